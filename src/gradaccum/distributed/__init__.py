"""Ranks of `torch.distributed` that share an effective batch."""

from gradaccum.distributed.data_parallel import DataParallel, sync_of

__all__ = ["DataParallel", "sync_of"]
