stepfork validate forked.sftrace --strict
