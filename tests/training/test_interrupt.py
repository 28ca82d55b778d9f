"""Ctrl-C and SIGTERM save after the step; a second one does not wait. Of several processes: test_parallel.py."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from transformers import TrainerControl

from metaplastic.training import MetaplasticTrainer, interrupt, train
from metaplastic.training.checkpoint import checkpoints, step_of
from metaplastic.training.interrupt import Interruption

from .test_run import assert_same_run


def interrupt_at(monkeypatch, *micro_steps, number=signal.SIGINT):
    """Sends a signal within these training steps (three make a step of the optimiser); counts those that ended."""
    original, done = MetaplasticTrainer.training_step, []

    def training_step(self, *args):
        if len(done) in micro_steps:
            os.kill(os.getpid(), number)
        result = original(self, *args)
        done.append(self.state.global_step)
        return result

    monkeypatch.setattr(MetaplasticTrainer, "training_step", training_step)
    return done


@pytest.mark.parametrize("save_every", [3, 0])
def test_an_interrupted_run_saves_after_its_step_and_goes_on(
    tiny, tmp_path, monkeypatch, caplog, undisturbed, save_every
):
    config = tiny(save_every=save_every)
    with monkeypatch.context() as patch:
        done = interrupt_at(patch, 13)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run")
    assert len(done) == 15 and done[-1] == 4  # the fifth step was finished
    assert [step_of(folder) for folder in checkpoints(tmp_path / "run")][-1] == 5
    assert not (tmp_path / "run" / "final").exists()
    assert "saving a checkpoint after this step" in caplog.text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result = train(config, tmp_path / "run")
    assert result["measurements"]["steps_this_call"] == 5
    assert_same_run(tmp_path / "run", undisturbed, only_results=True)


def test_a_second_one_stops_at_once(tiny, tmp_path, monkeypatch):
    done = interrupt_at(monkeypatch, 13, 14)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path / "run")
    assert len(done) == 14
    assert [step_of(folder) for folder in checkpoints(tmp_path / "run")] == [3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_saves_after_the_step_and_ends_with_its_code(tiny, tmp_path, monkeypatch, caplog, undisturbed):
    with monkeypatch.context() as patch:
        done = interrupt_at(patch, 13, number=signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            train(tiny(), tmp_path / "run")
    assert ended.value.code == 143
    assert len(done) == 15 and [step_of(folder) for folder in checkpoints(tmp_path / "run")][-1] == 5
    assert "SIGTERM: saving a checkpoint after this step" in caplog.text
    assert "ended by SIGTERM: the same command goes on" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train(tiny(), tmp_path / "run")["measurements"]["steps_this_call"] == 5
    assert_same_run(tmp_path / "run", undisturbed, only_results=True)


def test_in_the_last_step_nothing_is_lost(tiny, tmp_path, monkeypatch, undisturbed):
    with monkeypatch.context() as patch:
        original = MetaplasticTrainer.training_step

        def training_step(self, *args):
            if self.state.global_step == 9:
                os.kill(os.getpid(), signal.SIGINT)
                patch.setattr(MetaplasticTrainer, "training_step", original)
            return original(self, *args)

        patch.setattr(MetaplasticTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), tmp_path / "run")
    assert train(tiny(), tmp_path / "run")["measurements"]["steps_this_call"] == 0
    assert_same_run(tmp_path / "run", undisturbed, only_results=True)


def test_an_error_is_not_hidden():
    def fail():
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            assert interruption.came
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_and_threads_are_left_alone():
    def mine(*args):
        pass

    defaults = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, default in defaults.items():
        signal.signal(number, mine)
        try:
            with Interruption():
                assert signal.getsignal(number) is mine
        finally:
            signal.signal(number, default)
    found = []

    def elsewhere():
        with Interruption():
            found.extend(signal.getsignal(number) for number in defaults)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == list(defaults.values())


def test_several_processes_ask_one_another_where_they_wait_anyway_and_every_few_seconds(monkeypatch):
    """Four seconds a step, then a hundredth; and what comes twice at once to a process of several is one signal."""
    clock, asked = [100.0], []
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(interrupt.dist, "all_reduce", lambda told, how: asked.append((step, int(told[0]))))
    monkeypatch.setenv("WORLD_SIZE", "2")
    interruption, arguments = Interruption(), SimpleNamespace(device="cpu")
    interruption.on_train_begin(arguments, SimpleNamespace(global_step=7), TrainerControl())
    for step in range(8, 1100):
        clock[0] += 4 if step < 12 else 0.01
        control = TrainerControl(should_log=step == 20)
        interruption.on_step_end(arguments, SimpleNamespace(global_step=step), control)
        assert not control.should_training_stop
    steps = [step for step, _ in asked]
    assert steps[:4] == [8, 9, 10, 11] and 20 in steps and steps[-1] - steps[-2] in range(490, 511)
    assert len(steps) <= 12
    control = TrainerControl(should_save=True)
    with interruption:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        interruption.on_step_end(arguments, SimpleNamespace(global_step=1200), control)
        assert control.should_training_stop and asked[-1][1] == signal.SIGTERM
        interruption.came = interruption._agreed = False
