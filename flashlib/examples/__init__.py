"""Programs that `torchrun` starts once for each rank (chapter *Ring attention*)."""
