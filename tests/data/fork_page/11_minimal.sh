# Original trace has 50 events, but failure happens at step 8
stepfork fork failure.sftrace --at-step 8 -o minimal.sftrace

# Now minimal.sftrace is a 9-event reproducer
