# Fork at step 5
stepfork fork failure.sftrace --at-step 5 --output forked.sftrace

# Fork at a specific event ID
stepfork fork trace.sftrace --at-event evt_abc123 -o forked.sftrace
