"""What a job does: its objects and pods watched, logs and events kept, why it waits, where it stands."""
