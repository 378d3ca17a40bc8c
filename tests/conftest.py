"""What every test needs: `tests.support.oracles` importable from anywhere, one thread, and files that share their fixtures."""

import gc
import os
import re
import resource
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)

EXPERIMENTS = Path(__file__).parent / "experiments"  # what guards them runs in test-slow

# Cases that show again what the others of the same test show: they run in test-slow.
REPEATS = re.compile("|".join((
    r"test_blocked.*derivatives_of_torch_sgd\[(?!plain-|two groups-).*-(never|always)\]",
    r"test_blocked.*derivatives_of_torch_sgd\[(l2|decoupled|dampening|dampening without momentum|momentum|nesterov)-sometimes\]",
    r"test_blocked.*torch_adam_with_v_frozen\[(?!adamw-).*-(never|always)\]",
    r"test_blocked.*torch_adam_with_v_frozen\[(adamw|adam with l2|adamw, two groups)-sometimes\]",
    r"test_blocked.*equals_unrolling_by_autograd\[.*-whole-.*-(all pending|few pending|none)-",
    r"test_blocked.*equals_unrolling_by_autograd\[.*-(all pending|few pending|none)-1.0\]",
    r"test_steps.*runs_away\[(plain|dampening|heavy ball 0.5|nesterov 0.5)\]",
    r"test_steps.*single_rates\[(plain|nesterov 0.5)\]",
    r"test_overwriting.*bending_it_changes\[(momentum|nesterov|groups)-(1.0|when_expanding|never)\]",
    r"test_overwriting.*bending_it_changes\[(adam, own diagonal|plain)-(never|1.0)\]",
    r"test_overwriting.*terms_add_up_to_what_was_lost\[.*-(1.0|always)\]",
    r"run.test_compress.*each_step_changes_nothing\[(sgd|sgd, clipped|momentum|adamw, diagonal|adamw, preconditioned)\]",
    r"test_overwriting.*in_every_run\[(nesterov|groups|sgd|sgd, exact curvature|adamw, diagonal)-(never|always)\]",
    r"recording.test_adam.*scaled_and_then_projected\[(foreach|not foreach|fused)-.*-None\]",
    r"run.test_compress.*equal_the_adjoint\[((sgd|momentum|adamw, preconditioned|adamw, diagonal|sgd, clipped)-True|(sgd|momentum|adamw, preconditioned|adamw, preconditioned, clipped)-False)\]",
    r"test_contributions.*at_each_layers_own_output\[(.*-random-3|(attention|tied|rules that write out)-full-3)\]",
    r"test_contributions.*leave_the_gradient_whole\[(random|full)-None\]",
    r"recording.test_resume\.py.*(exception_in_any_step\[learned, (int8|several calls)\]|older_checkpoint\[(full|learned, several calls)-1\])",
    r"test_resume_adam.*(after_the_warm_up\[(learned-2|full-0)\]|without_a_word\[random\])",
    r"test_run_adam.*embeddings_and_adjoint_agree\[(mask|random|full|full, split rows)-True\]",
    r"test_run_adam.*torchs_own_steps\[.*-None\]",
    r"test_run_adam.*through_the_scaled_steps\[((learned|random)-None|random-0.3)\]",
    r"test_run_adam.*occurs_once_is_its_influence\[(full|mask|random)\]",
    r"test_segments.*(sgd|nesterov|momentum|adamw, diagonal|adamw, learned)-3-True\]",
    r"test_segments.*(sgd|sgd, clipped|momentum|adamw, diagonal)-3-False\]",
    r"test_run\.py.*all_steps_agree.*\[(plain-False-0.05|plain-True-0.05|momentum and decay-False-None|nesterov-False-None|dampening-False-None|momentum-False-None)\]",
    r"test_segments.*a_worker_that_is_killed_changes_nothing",
    r"test_plan\.py.*(chosen_in_the_trial\[gpt\]|propagator\[(adamw|momentum)\]|as_planned\[(gpt with checkpoints|mlp random, small rows)\])",
    r"test_plan\.py.*compressed_store_is_as_large_as_planned",
    r"test_plan\.py.*the_largest_rank_fills_the_budget\[with a diagonal\]",
    r"test_compile.*rows_of_a_compiled_model\[(whole-eager|method-aot_eager|wrapper of what is recorded-eager)\]",
    r"test_huggingface.*as_if_undisturbed\[6-2-full\]",
    r"test_reverse.*differences_of_the_replay\[((sgd|decay|momentum|nesterov|adam)-None|(sgd|decay)-0.15)\]",
    r"test_reverse.*each_missing_path\[sgd-0.15",
    r"test_checkpointing.*-Llama\]",
    r"test_precision.*loss_scale_and_clipping.*Llama\]",
    r"test_transformers.*in_adams_coordinates\[(learned|random)-Llama\]",
    r"test_lora.*start_from_zero_is_recorded\[(random|full)-Llama\]",
    r"test_browser\.py.*test_axe_finds_nothing_serious_and_pages_fit\[(digits-dark|text-)",
    r"test_browser\.py.*every_page_fits_a_phone\[text\]",
    r"test_browser_answers\.py.*verdict_and_reason\[/(harmful|sources.*)\]",
    r"test_report\.py.*slider_works_in_the_file_alone\[text\]",
    r"test_report\.py.*draws_it_and_asks_nobody\[390\]",
    r"test_kill\.py.*survives_kills\[1 kill\]",  # test_run_store and test_projecting kill too, test_resume goes on after a death
    r"test_compile.*rows_of_a_compiled_model\[whole-aot_eager\]",
    r"test_run_adam.*embeddings_and_adjoint_agree\[(random|mask|full, split rows)-False\]",
    r"test_run_adam.*rows_are_taken_apart\[empirical/1-",
    r"test_plan\.py.*largest_rank_fills_the_budget\[from full\]",
    r"test_plan\.py.*as_large_as_planned\[gpt mask, diagonal kept\]",
    r"test_from_checkpoints.*before_every_step_it_is_the_recording\[(adamw|amsgrad|ball)-.*-False\]",
    r"test_huggingface.*rows_are_those_of_a_loop_by_hand\[1-Llama\]",
    r"test_reverse.*differences_of_the_replay\[(nesterov|momentum)-0.15\]",
    r"test_checkpointing.*(extra_passes_go_through_checkpoints\[sampled:2-|rows_are_those_without_checkpointing\[True-)",
    r"run.test_compress.*equal_the_adjoint\[sgd, clipped-False\]",
    r"cli.test_insight.*all_of_them_as_notes\[(evolution|sources|overwriting)\]",
    r"test_lora.*start_from_zero_is_recorded\[(learned-Llama|random-GPT-2)\]",
    r"test_resume\.py.*from_an_older_checkpoint\[(learned-5|full-5)\]",
    r"test_leave_out.*stacked_equals_plain_equals_by_hand\[(momentum|adam)-0.3-True\]",
    r"test_tangent.*(whole_runs\[(sgd|decay|momentum|nesterov|adam)-None\]|sums_to_it\[(decay|nesterov|adam)\])",
    r"test_exact_kill.*each_way_survives_a_kill",  # test_left_out and test_tangents go on after an interruption; ten kills are slow too
    r"test_report\.py.*keys_lead_nowhere_in_a_file",
    r"test_browser\.py.*(two_texts_are_compared_and_one|how_far_to_trust_it\[text\])",
    r"test_exactness.*differences_of_torch_are_the_same\[(momentum|dampening|l2|adam|sgd, clipped)\]",
    r"test_run\.py.*embeddings_and_adjoint_agree\[(plain|nesterov|momentum)-.*-(never-True|always-False)\]",
    r"test_run\.py.*last_step_agrees_with_finite_differences\[(plain|momentum|dampening|nesterov)-True-0.05\]",
    r"test_leave_out.*stacked_equals_plain_equals_by_hand\[(momentum|nesterov)-None-(False|True)\]",
    r"recording.test_adam.*scaled_and_then_projected\[(not foreach|foreach)-(random|learned)-0.1\]",
    r"recording.test_adam.*optimizers_own_count\[(not foreach|foreach)-Adam(, decoupled)?-(0|4)\]",
    r"test_contributions.*under_a_token_mean\[(random|full)-(1|2)\]",
    r"test_tangent.*whole_runs\[(sgd|decay|momentum)-0.15\]",
    r"test_warmup.*basis_of_the_warm_up\[.*-1\]",
    r"test_selection.*each_way_that_the_error_names\[encoder-(skip|a pattern of modules|its parameters)\]",
    r"test_precision.*float32_but_for_rounding\[(GPT-NeoX|Llama)\]",
    r"test_embed\.py.*small_chunks_give_the_same\[(0.0-True|0.9-False)\]",
    r"test_projecting.*fewest_coordinates_that_hold_the_share\[0.8-",
    r"test_segments.*workers_and_their_number_change_nothing",  # test_tangents and test_workers spread work over processes too
    r"test_projecting.*killed_while_the_choice_is_made",  # test_resume dies at the same place
    r"test_run_store.*a_file_that_cannot_grow",  # a full disk is quick
    r"test_files.*a_child_that_ends_does_not_free_the_lock",  # a forked worker that lives on is quick
    r"test_resume_adam.*before_during_and_after_the_warm_up\[learned-0\]",
    r"test_huggingface.*learned_subspace_and_sampled_curvature",
    r"test_phases.*what_few_steps_show_is_no_clear_pattern\[(?!three steps).*-(60|90)\]",
    r"test_overwriting.*in_every_run\[(momentum, decay, clipped-(always|never)|adamw, preconditioned, clipped-always)\]",
    r"test_overwriting.*bending_it_changes\[(plain|groups|momentum|nesterov)-always\]",
    r"test_run_adam.*(embeddings_and_adjoint_agree\[(full|learned)-False\]|through_the_scaled_steps\[learned, split rows-None\])",
    r"test_run_adam.*at_a_checkpoint_is_that_to_a_run_that_ended_there\[(random|full)\]",
    r"test_blocked.*derivatives_of_torch_sgd\[(two groups-(always|never)|plain-always)\]",
    r"test_blocked.*torch_adam_with_v_frozen\[adam with l2, two groups-sometimes\]",
    r"test_tokens.*positions_sum_to_the_occurrence\[(AdamW, learned|AdamW as SGD|momentum, clipped, learned)\]",
    r"test_contributions.*at_each_layers_own_output\[(tied|positions for the batch, tied)-learned-3\]",
    r"test_contributions.*leave_the_gradient_whole\[(random|full)-0.1\]",
    r"test_lightning.*as_if_undisturbed\[(1|3)-full\]",
    r"test_reverse.*differences_of_the_replay\[(adam-0.15|adamw-None)\]",
    r"test_transformers.*one_backward_per_sample\[(Qwen3|Gemma2)\]",
    r"recording.test_resume\.py.*(exception_in_any_step\[full\]|death_without_a_word\[full\])",
    r"test_plan\.py.*as_large_as_planned\[mlp with checkpoints\]",
    r"test_compress.*equal_the_adjoint\[adamw, diagonal-False\]",
    r"run.test_run\.py.*embeddings_and_adjoint_agree\[(momentum|nesterov|plain)-.*-(never|always)-(True|False)\]",  # with decay is quick
    r"run.test_run\.py.*all_steps_agree.*\[(momentum|dampening)-True-0.05\]",
    r"run.test_run\.py.*last_step_agrees.*\[(plain|momentum|nesterov|dampening)-(True|False)-0.05\]",
    r"recording.test_adam.*rows_are_scaled_and_then_projected\[(plain|amsgrad|not foreach|fused)-(random-.*|learned-0.1)\]",
    r"recording.test_adam.*rows_of_sequences\[random-",
    r"test_reverse.*sees_each_missing_path\[(decay|adam)-None",
    r"test_plan\.py.*(memory_of_the_propagator\[sgd\]|the_suggested_rank_is_the_largest)",
    r"test_howto.*\[(large|checkpoints|lora)\]",  # tests/recording and tests/models show what they do
    r"test_browser\.py.*(replay_plays_all_checkpoints|theme_follows_the_system|two_images_are_compared)",
    r"test_leave_out.*stacked_equals_plain_equals_by_hand\[(decay|momentum|nesterov|sgd|adam)-.*-False\]",
    r"test_precision.*(loss_scale_and_clipping\[0.05|in_bfloat16\[(Llama|GPT-NeoX)|float32_but_for_rounding\[(GPT-NeoX|Llama))",
)))  # fmt: skip


@pytest.fixture(autouse=True)
def _rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ROUNDING=noisy, as `make test-rounding` sets it, products come out with a random last bit.

    Each test has draws of its own, the same whenever it runs: with one seed for all, what two tests compute would agree.
    """
    if os.environ.get("ROUNDING") != "noisy":
        yield
        return
    from tests.support.rounding import NoisyRounding

    with NoisyRounding(zlib.crc32(request.node.nodeid.encode())):
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what guards experiments, where slow tests are left out."""
    return True if "not slow" in config.option.markexpr and is_experiment(collection_path) else None


def is_experiment(path: Path) -> bool:
    return path.is_relative_to(EXPERIMENTS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What guards experiments and what repeats other tests is slow."""
    for item in items:
        if is_experiment(item.path) or REPEATS.search(item.nodeid):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector of garbage, which transformers calls after every training, need not look at it again."""
    gc.collect()
    gc.freeze()


class Together(LoadScopeScheduling):
    """One process runs the whole of a file, so that what it trains or starts is made once; one runs all that need a browser."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        return "browser" if path.startswith("tests/web/browser/") else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Instead of xdist's groups by marks, which 3.8 does not hand over to the scheduler with pytest 9."""
    return Together(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How much processor time the tests took: it must stay under 12 minutes, whatever else the machine does."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    minutes, seconds = divmod(sum(x.ru_utime + x.ru_stime for x in used), 60)
    terminalreporter.write_line(f"CPU time {minutes:.0f} min {seconds:.0f} s (pytest and its children, user + system)")
