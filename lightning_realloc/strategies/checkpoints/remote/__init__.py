"""Write checkpoints to object stores, which have no renames. Start with `remote_target.RemoteTarget`."""
