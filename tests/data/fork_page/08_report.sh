stepfork fork failure.sftrace --at-step 2
