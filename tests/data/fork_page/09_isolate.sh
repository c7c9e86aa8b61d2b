# Test if failure happens before step 10
stepfork fork failure.sftrace --at-step 10 -o test-step10.sftrace
stepfork replay test-step10.sftrace --entrypoint agent:run

# Binary search to find exact failure point
