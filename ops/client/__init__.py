"""An httpx transport under which a stream outlives the API process that serves it; the official SDKs run on top."""

from ops.client.exchange import ResumeRefused
from ops.client.transport import ResumingTransport
from ops.client.transport_async import AsyncResumingTransport

__all__ = ["AsyncResumingTransport", "ResumeRefused", "ResumingTransport"]
