"""The index against a simple model: any sequence of operations by two holders, one of which may die and come back."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from shadow_harness import open_index

from coda_engine.shadow import EvictionPolicyName, ShadowLayout
from coda_engine.shadow.index_file import participant_byte

pytestmark = pytest.mark.stress

SLOTS = 8
LAYOUT = ShadowLayout("model", 64, 1, SLOTS)
KEYS = [b"key %d" % number for number in range(12)]
HOLDERS = st.sampled_from((0, 1))
SOME_KEYS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5)


class ShadowMachine(RuleBasedStateMachine):
    """Holders 0 and 1 of one index; the model knows what is ready, reserved and pinned, and by whom."""

    reservations = Bundle("reservations")
    pinned = Bundle("pinned")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="coda-test-", dir="/dev/shm"))
        self.now_s = 0.0
        self.lives = [0, 0]
        self.heard = [set(), set()]
        self.indexes = [self.opened(0, "lru"), self.opened(1, "fifo")]
        self.ready = {}
        self.reserved = {}
        self.pins = Counter()
        self.withdrawn = set()

    def opened(self, holder, eviction):
        self.now_s += 10
        index = open_index(
            self.folder, LAYOUT, eviction=EvictionPolicyName(eviction), clock=lambda: self.now_s, lock_wait_s=5.0
        )
        self.heard[holder] = set(index._mirror.ready)
        heard = self.heard[holder]

        def listen(key, present):
            assert present == (key not in heard)
            heard.symmetric_difference_update({key})

        index.on_change(listen)
        return index

    def teardown(self):
        for index in self.indexes:
            index.close()
        shutil.rmtree(self.folder)

    def is_pinned(self, generation):
        return any(count for (_, pinned), count in self.pins.items() if pinned == generation)

    @rule(target=reservations, holder=HOLDERS, keys=SOME_KEYS, protect=SOME_KEYS)
    def reserve(self, holder, keys, protect):
        wanted = [key for key in dict.fromkeys(keys) if key not in self.ready and key not in self.reserved]
        kept = {key for key, generation in self.ready.items() if self.is_pinned(generation)}
        evictable = set(self.ready) - kept - set(keys) - set(protect)
        waiting = {generation for generation in self.withdrawn if self.is_pinned(generation)}
        free = SLOTS - len(self.ready) - len(self.reserved) - len(waiting)
        refs = self.indexes[holder].reserve(keys, protect)
        if len(wanted) > free + len(evictable):
            assert refs is None
            return multiple()
        assert [ref.key for ref in refs] == wanted
        self.indexes[1 - holder].sync()
        vanished = {key for key in self.ready if not self.indexes[holder].ready(key)}
        assert vanished <= evictable
        assert len(vanished) == max(0, len(wanted) - free)
        for key in vanished:
            del self.ready[key]
        for ref in refs:
            self.reserved[ref.key] = (holder, ref.generation)
        return multiple((holder, self.lives[holder], refs))

    @rule(reservation=consumes(reservations))
    def publish(self, reservation):
        holder, life, refs = reservation
        self.indexes[holder].publish(refs)
        for ref in refs:
            if life == self.lives[holder]:
                assert self.reserved.pop(ref.key) == (holder, ref.generation)
                self.ready[ref.key] = ref.generation

    @rule(reservation=consumes(reservations))
    def abandon(self, reservation):
        holder, life, refs = reservation
        self.indexes[holder].abandon(refs)
        for ref in refs:
            if life == self.lives[holder]:
                del self.reserved[ref.key]

    @rule(target=pinned, holder=HOLDERS, keys=SOME_KEYS)
    def pin(self, holder, keys):
        refs = self.indexes[holder].pin(keys)
        if not all(key in self.ready for key in keys):
            assert refs is None
            return multiple()
        assert [(ref.key, ref.generation) for ref in refs] == [(key, self.ready[key]) for key in keys]
        self.pins.update((holder, ref.generation) for ref in refs)
        return multiple((holder, self.lives[holder], refs))

    @rule(pin=consumes(pinned))
    def unpin(self, pin):
        holder, life, refs = pin
        if life == self.lives[holder]:
            self.indexes[holder].unpin(refs)
            self.pins.subtract((holder, ref.generation) for ref in refs)

    @rule(holder=HOLDERS, pin=pinned)
    def poison(self, holder, pin):
        refs = pin[2]
        self.indexes[holder].poison(refs)
        for ref in refs:
            if self.ready.get(ref.key) == ref.generation:
                del self.ready[ref.key]
                self.withdrawn.add(ref.generation)

    @rule(holder=HOLDERS, keys=SOME_KEYS)
    def touch(self, holder, keys):
        self.indexes[holder].touch(keys)

    @rule(step_s=st.floats(-20, 20))
    def let_time_pass(self, step_s):
        self.now_s += step_s

    @rule(is_death=st.booleans())
    def end_and_come_back(self, is_death):
        index = self.indexes[1]
        if is_death:  # What the kernel does.
            index._session.file.locks.release(participant_byte(index._session.number))
            index._session.number = -1
            index._is_open = False
            index._session.file.close()
        else:
            index.close()
        self.lives[1] += 1
        self.reserved = {key: (holder, gen) for key, (holder, gen) in self.reserved.items() if holder != 1}
        for pin in [pin for pin in self.pins if pin[0] == 1]:
            del self.pins[pin]
        self.indexes[1] = self.opened(1, "lru")

    @invariant()
    def everybody_agrees_with_the_model(self):
        self.now_s += 10
        for index, heard in zip(self.indexes, self.heard, strict=True):
            index.sync()
            assert {key for key in KEYS if index.ready(key)} == set(self.ready) == heard
            assert {key for key in KEYS if index.writing(key)} == set(self.reserved)
            figures = index.statistics()
            assert figures.used_pages == len(self.ready)
            assert figures.writing_pages == len(self.reserved)
            assert figures.poisoned_pages == len([gen for gen in self.withdrawn if self.is_pinned(gen)])
            assert figures.free_pages == SLOTS - figures.used_pages - figures.writing_pages - figures.poisoned_pages
            assert (figures.damaged, figures.repairs, figures.lock_timeouts) == (0, 0, 0)


ShadowMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_any_sequence_of_operations_agrees_with_the_model = ShadowMachine.TestCase
