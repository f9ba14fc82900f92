"""The parts of a running API process, and the order in which they start and stop."""

from __future__ import annotations

from api.background.canary import Canary
from api.background.completion import ResponseCompletion
from api.background.heartbeat import Heartbeat
from api.background.orphans import OrphanReaper
from api.background.plot_history import PlotHistory
from api.generation.archive import Archive
from api.generation.follow import Follower
from api.generation.seals import Seals
from api.generation.session import Sessions, ShutdownState
from api.generation.stored_answers import StoredAnswers, StoredChats
from api.http.bodies import Bodies
from api.http.gate import Gate, Keyring, OriginCheck
from api.http.limits import Limiter, Settler
from api.http.middleware import Admission
from api.images.fetching import Fetcher
from api.images.hosts import AllowedHosts
from api.images.loading import ImageLoader
from api.models.farm import AccountReads, FarmEvents, SharedReads
from api.models.grammar import GrammarChecks
from api.models.models import ModelRegistry
from api.observability import EndReports, Metrics, WaitLog
from api.settings import ApiSettings
from control.redis.connection import Batches, connect, connect_async, hardened


class Process:
    """Everything that lives as long as the process."""

    def __init__(self, settings: ApiSettings) -> None:
        self.settings = settings
        self.shutdown = ShutdownState()
        self.client = hardened(connect_async(settings.redis_url))
        self.batches = Batches(self.client)
        self.sync_client = connect(settings.redis_url)
        """For what reads much and seldom, in a thread."""
        self.metrics = Metrics()
        self.keyring = Keyring(self.batches)
        self.gate = Gate(
            self.keyring,
            asks_for_key=settings.asks_for_key,
            farm_open=settings.farm_open,
            fixed_keys=settings.api_keys,
        )
        self.origins = OriginCheck(
            asks_for_key=settings.asks_for_key, cors_origins=settings.cors_origins, host=settings.host
        )
        self.settler = Settler(self.batches)
        self.limiter = Limiter(self.batches, self.settler)
        self.admission = Admission(
            settings.connection_limits.admission_s, lambda status: self.metrics.request_ended(status, None, 0.0)
        )
        self.bodies = Bodies(settings.body_limits)
        self.images = ImageLoader(fetcher=Fetcher(AllowedHosts(settings.image_hosts)) if settings.image_hosts else None)
        self.models = ModelRegistry(self.sync_client, settings, self.images, self.client)
        self.follower = Follower(self.client, self.batches, settings)
        self.orphans = OrphanReaper(self.sync_client, settings.api_id, self.client)
        self.heartbeat = Heartbeat(self.client, settings)
        self.canary = Canary(self.batches, self.models, self.follower, settings)
        self.grammars = GrammarChecks()
        self.archive = Archive(self.batches, settings)
        self.seals = Seals(self.batches)
        self.wait_log = WaitLog(settings.wait_warning)
        self.ended_requests = EndReports(self.client)
        self.plot_history = PlotHistory(self.client, self.models)
        self.sessions = Sessions(
            self.follower,
            self.batches,
            self.models,
            self.archive,
            self.seals,
            self.grammars,
            self.limiter,
            self.wait_log,
            settings,
            self.shutdown,
        )
        self.shared_reads = SharedReads(self.sync_client)
        self.account_reads = AccountReads(self.sync_client)
        self.farm_events = FarmEvents(self.sync_client, lambda: self.shutdown.draining)
        self.stored_answers = StoredAnswers(self.client, self.archive, self.sessions, self.seals)
        self.stored_chats = StoredChats(self.batches, self.archive, self.stored_answers)
        self.completion = ResponseCompletion(
            self.client, self.sync_client, self.archive, self.sessions, self.stored_answers, self.metrics
        )

    def start(self) -> None:
        self.heartbeat.start()
        self.keyring.start()
        self.models.start()
        self.follower.start()
        self.wait_log.start()
        self.ended_requests.start()
        self.plot_history.start()
        self.orphans.start()
        self.settler.start()
        self.completion.start()

    def interrupt(self) -> None:
        """End every stream and every wait of this process; the requests themselves go on."""
        self.shutdown.interrupted = True
        self.follower.wake_all()

    async def stop(self) -> None:
        await self.farm_events.stop()
        self.shared_reads.stop()
        self.account_reads.stop()
        await self.completion.stop()
        await self.wait_log.stop()
        await self.plot_history.stop()
        await self.ended_requests.stop()
        await self.follower.stop()
        await self.grammars.stop()
        await self.limiter.stop()
        await self.settler.stop()
        await self.keyring.stop()
        await self.orphans.stop()
        await self.models.stop()
        await self.images.stop()
        await self.heartbeat.stop()
        await self.client.aclose()
        self.sync_client.close()
