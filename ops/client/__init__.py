"""A resuming transport for official clients."""

from ops.client.transport import AsyncResumingTransport, ResumeRefused, ResumingTransport

__all__ = ["AsyncResumingTransport", "ResumeRefused", "ResumingTransport"]
