"""A resuming transport for official clients."""

from ops.client.exchange import ResumeRefused
from ops.client.transport import ResumingTransport
from ops.client.transport_async import AsyncResumingTransport

__all__ = ["AsyncResumingTransport", "ResumeRefused", "ResumingTransport"]
