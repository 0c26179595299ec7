"""Settings of all tests: CPU devices, of which a test sees one unless it is marked with `devices(8)`, NNX's tree mode,
a compilation cache for the session."""

import gc
import os
import shutil
import tempfile

import hypothesis
import pytest

from input_pipeline import once
from tests import programs, tiny
from tests.tiny import ROOT
from trainer import startup

# Before JAX is imported. Subprocesses inherit these; those that want another number of devices override XLA_FLAGS.
os.environ.update(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=tiny.xla_flags(8),
    NNX_GRAPH_MODE="false",
    NNX_GRAPH_UPDATES="false",
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.3",
    WEFT_REPORT_STRICT="1",  # a report that cannot be written is a warning elsewhere (trainer/report/record.py)
    PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
)
startup.set_environment()  # as in a user's run, if this jaxlib is known to take them
# One cache for all workers of this session, in a folder of its own that is new each time.
_OWNS_CACHE = "WEFT_TEST_CACHE" not in os.environ
if _OWNS_CACHE:
  os.environ["WEFT_TEST_CACHE"] = tempfile.mkdtemp(prefix="weft-test-cache-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["WEFT_TEST_CACHE"]

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("weft", deadline=None)
hypothesis.settings.load_profile("weft")


def pytest_unconfigure():
  if _OWNS_CACHE:
    shutil.rmtree(os.environ["WEFT_TEST_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def look_for_garbage_less_often():
  """Tracing makes so many objects that Python by itself would look through all of them every few seconds, a twentieth
  of the time; what importing all files of tests has made stays to the end."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 4)


@pytest.fixture(autouse=True)
def say_everything_again():
  """What a process says once, each test may hear."""
  once.forget()


@pytest.fixture(scope="session", autouse=True)
def share_programs():
  """What several tests compile is compiled once; as users do it, each run compiles for itself."""
  if not tiny.AS_IN_USERS_RUNS:
    programs.share()


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
  """What one file's tests compiled is often of use to the next's, but all of it would be gigabytes by the end."""
  yield
  programs.forget_if_large()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
  """Before fixtures, those of whole files too."""
  marker = item.get_closest_marker("devices")
  programs.show(marker.args[0] if marker else 1)
  programs.traced = "monkeypatch" not in item.fixturenames


# A third of a minute or more each on two slow cores. Most have a quicker one for their subject (another strategy,
# another mesh); exhausted memory, and rollouts and rollbacks of several processes, are tested here alone. `pytest`
# leaves them out, `pytest -m slow` runs them, `pytest -m ""` runs everything.
SLOW = """
tests/evaluators/test_classify.py::test_scores_are_log_probs_of_the_options[sum-False]
tests/evaluators/test_classify.py::test_scores_are_log_probs_of_the_options[sum-True]
tests/models/experts/test_moe.py::test_a_run_writes_the_metrics
tests/models/experts/test_moe.py::test_bfloat16_is_close_to_float32
tests/models/experts/test_moe.py::test_eight_devices_compute_what_one_does[fsdp]
tests/models/experts/test_moe.py::test_eight_devices_compute_what_one_does[tensor and fsdp]
tests/models/experts/test_moe.py::test_micro_batches_change_neither_gradient_nor_terms_nor_load[1]
tests/test_docs_commands.py::test_commands_run[dpo.md]
tests/test_docs_commands.py::test_commands_run[grpo.md]
tests/test_docs_commands.py::test_commands_run[tutorial.md]
tests/test_faults.py::test_a_signal_saves_and_exits_0_and_the_run_goes_on[1device-2]
tests/test_faults.py::test_a_signal_saves_and_exits_0_and_the_run_goes_on[8devices-15]
tests/test_faults.py::test_exhausted_memory_says_where_it_goes_and_what_to_type
tests/test_faults.py::test_killed_at_any_moment_it_becomes_the_same_run[8devices]
tests/test_processes.py::test_four_processes_train_evaluate_and_sample_as_one
tests/test_processes.py::test_two_and_four_processes_sample_rollouts_and_train_as_one
tests/test_processes.py::test_two_processes_go_back_before_a_spike_as_one_does
tests/trainer/strategies/test_dpo_runs.py::test_a_stopped_run_goes_on_with_the_reference_it_had[fixed]
tests/trainer/strategies/test_dpo_runs.py::test_another_run_can_be_the_reference_and_must_stay_the_same
tests/trainer/strategies/test_dpo_runs.py::test_micro_batches_devices_and_packing_do_not_change_the_parameters
tests/trainer/strategies/test_dpo_runs.py::test_precomputed_and_live_references_give_the_same_losses
tests/trainer/export/test_hugging_face.py::test_adapters_of_another_run_go_on_over_the_same_base
tests/trainer/test_image_runs.py::test_micro_batches_and_other_meshes_change_nothing[dpo]
tests/trainer/test_image_runs.py::test_micro_batches_and_other_meshes_change_nothing[seq]
tests/trainer/distributed/test_layouts.py::test_one_device_and_eight_compute_the_same[dense-data8]
tests/trainer/distributed/test_layouts.py::test_one_device_and_eight_compute_the_same[moe-data2 expert4]
tests/trainer/distributed/test_layouts.py::test_one_device_and_eight_compute_the_same[moe-expert2 context2 tensor2]
tests/trainer/modes/test_microscope.py::test_images_stand_where_their_tokens_are
tests/trainer/modes/test_microscope.py::test_weights_times_log_probs_add_up_to_the_logged_loss[seq]
tests/trainer/test_paligemma.py::test_a_frozen_tower_stays_the_rest_learns_and_the_export_is_read_again
tests/trainer/test_precision.py::test_a_mixture_of_experts_learns_with_quantised_products
tests/trainer/test_precision.py::test_a_model_learns_as_in_float32[moments=int8]
tests/trainer/test_precision.py::test_quantised_products_on_eight_devices[options1-f8e4m3fn-0.02]
tests/trainer/test_precision_runs.py::test_a_stopped_run_continues_bitwise
tests/trainer/generate/test_sampler.py::test_logprobs_equal_teacher_forced_ones[olmo]
tests/trainer/generate/test_sampler_images.py::test_logprobs_equal_teacher_forced_ones[causal, CLIP]
tests/trainer/generate/test_sampler_images.py::test_logprobs_equal_teacher_forced_ones[image]
tests/trainer/telemetry/test_spikes.py::test_it_goes_back_and_on_with_the_data_after_the_spike[crash28]
tests/trainer/telemetry/test_spikes.py::test_it_goes_back_and_on_with_the_data_after_the_spike[crash32]
tests/trainer/telemetry/test_spikes.py::test_it_goes_back_and_on_with_the_data_after_the_spike[crash36]
tests/trainer/strategies/test_chunked_loss.py::test_strategies_do_not_depend_on_the_chunk[trainer.strategies.sft-cfg2]
tests/trainer/modes/test_verify.py::test_strategies[dpo]
tests/trainer/modes/test_verify.py::test_strategies[grpo]
tests/trainer/modes/test_verify.py::test_strategies[images]
tests/trainer/modes/test_verify.py::test_strategies[sft]
tests/models/test_transformer.py::test_bfloat16_compute_is_close_to_float32[gpt2]
tests/models/test_transformer.py::test_bfloat16_compute_is_close_to_float32[llama]
tests/models/test_transformer.py::test_logits_equal_the_numpy_model[gpt2-False]
tests/models/test_transformer.py::test_logits_equal_the_numpy_model[llama-False]
tests/models/test_transformer.py::test_logits_equal_the_numpy_model[olmo-False]
tests/models/test_vit.py::test_features_equal_the_numpy_tower[vision1-False]
tests/models/test_vit.py::test_features_equal_the_numpy_tower[vision2-True]
tests/models/test_vit.py::test_remat_changes_no_gradient[False]
tests/models/test_vlm.py::test_eight_devices_compute_the_same[{'data': 1, 'fsdp': 8}]
tests/models/test_vlm.py::test_texts_fed_in_parts_equal_whole_ones[siglip]
tests/models/experts/test_moe.py::test_scanned_unrolled_and_remat_agree[{'remat': 'dots'}]
tests/models/experts/test_moe.py::test_scanned_unrolled_and_remat_agree[{'remat': 'full'}]
tests/test_faults.py::test_a_harmed_workdir_becomes_the_same_run[a cut checkpoint]
tests/trainer/test_main.py::test_a_crashed_run_continues_bitwise[2]
tests/trainer/test_position.py::test_every_row_once_an_epoch_whatever_the_batch_sizes_were[8-4]
tests/trainer/test_position.py::test_every_row_once_an_epoch_whatever_the_batch_sizes_were[8-6]
tests/trainer/test_precision.py::test_a_model_learns_as_in_float32[matmul=int8]
tests/trainer/test_precision.py::test_a_model_learns_as_in_float32[moments=bfloat16]
tests/trainer/modes/test_replay.py::test_the_rows_losses_add_up_to_what_was_logged[micro-batches-1]
tests/trainer/modes/test_replay.py::test_the_rows_losses_add_up_to_what_was_logged[micro-batches-3]
tests/trainer/modes/test_replay.py::test_the_rows_losses_add_up_to_what_was_logged[whole-5]
tests/models/attention/test_cache.py::test_parameters_in_the_dtype_of_products_change_no_bit[options1]
tests/models/test_exactness.py::test_scanned_equals_unrolled[3-pattern4]
tests/models/test_lora.py::test_a_fresh_adapter_changes_nothing[False]
tests/models/test_vlm.py::test_eight_devices_compute_the_same[{'data': 2, 'fsdp': 2, 'tensor': 2}]
tests/trainer/distributed/test_layouts.py::test_one_device_and_eight_compute_the_same[dense-context8]
tests/trainer/distributed/test_layouts.py::test_one_device_and_eight_compute_the_same[dense-data2 fsdp2 tensor2]
tests/trainer/distributed/test_layouts.py::test_one_device_and_eight_compute_the_same[dense-fsdp8]
tests/trainer/distributed/test_layouts.py::test_one_device_and_eight_compute_the_same[gpt_oss-fsdp2 context2 tensor2]
tests/trainer/distributed/test_layouts.py::test_one_device_and_eight_compute_the_same[olmo-fsdp2 context2 tensor2]
tests/trainer/generate/test_sampler.py::test_rows_become_fewer_and_the_cache_longer_and_nothing_else_changes[gemma-6]
tests/trainer/rollouts/test_old_policy.py::test_in_bfloat16_a_policy_that_does_not_move_has_ratios_of_one[False]
tests/trainer/rollouts/test_old_policy.py::test_with_one_update_a_rollout_nothing_is_scored_nor_clipped[astrai]
tests/trainer/rollouts/test_old_policy.py::test_with_one_update_a_rollout_nothing_is_scored_nor_clipped[cispo]
tests/trainer/rollouts/test_old_policy.py::test_with_one_update_a_rollout_nothing_is_scored_nor_clipped[rloo]
tests/trainer/strategies/test_chunked_loss.py::test_strategies_do_not_depend_on_the_chunk[trainer.strategies.sft-cfg1]
tests/trainer/strategies/test_dpo_runs.py::test_a_prompt_that_both_share_changes_nothing_but_the_time[kto-False]
tests/trainer/strategies/test_grpo_runs.py::test_one_device_and_eight_do_the_same[data]
tests/trainer/strategies/test_own.py::test_on_rollouts_it_trains_as_grpo_of_the_same_loss[BY_GROUP-options1]
tests/trainer/strategies/test_sft_runs.py::test_packing_and_padding_change_neither_loss_nor_gradient[token-options2]
tests/trainer/telemetry/test_spikes.py::test_it_goes_back_and_on_with_the_data_after_the_spike[crashNone]
tests/trainer/test_image_runs.py::test_every_picture_counts_and_no_token_of_it_is_trained[dpo]
tests/trainer/test_position.py::test_every_row_once_an_epoch_whatever_the_batch_sizes_were[8-4-6]
tests/trainer/test_precision.py::test_a_model_learns_as_in_float32[matmul=fp8]
tests/trainer/test_precision.py::test_a_model_learns_as_in_float32[params=bfloat16]
tests/trainer/test_precision.py::test_eight_devices_compute_what_one_does[options0-2-0.995]
tests/trainer/modes/test_replay.py::test_the_rows_losses_add_up_to_what_was_logged[whole-8]
tests/trainer/strategies/test_dpo_runs.py::test_a_prompt_that_both_share_changes_nothing_but_the_time[dpo-False]
tests/trainer/strategies/test_dpo_runs.py::test_a_prompt_that_both_share_changes_nothing_but_the_time[kto-True]
tests/trainer/strategies/test_logprobs.py::test_tokens_that_do_not_count_change_nothing_for_those_that_do[variant1-30]
tests/trainer/strategies/test_logprobs.py::test_tokens_that_do_not_count_change_nothing_for_those_that_do[variant2-30]
tests/trainer/strategies/test_logprobs.py::test_tokens_that_do_not_count_change_nothing_for_those_that_do[variant3-30]
tests/trainer/strategies/test_own.py::test_it_trains_as_the_built_in_one_of_the_same_loss[pairs-own2-theirs2]
tests/trainer/strategies/test_sft_runs.py::test_packing_and_padding_change_neither_loss_nor_gradient[sequence-options0]
tests/trainer/strategies/test_sft_runs.py::test_packing_and_padding_change_neither_loss_nor_gradient[sequence-options2]
tests/trainer/planning/test_plan.py::test_bytes_of_the_state_are_those_that_a_device_holds[adamw-mixed]
tests/trainer/planning/test_plan.py::test_bytes_of_the_state_are_those_that_a_device_holds[muon-fsdp]
tests/trainer/planning/test_plan.py::test_memory_products_and_traffic_are_close_to_those_of_the_compiled_step[fsdp]
tests/trainer/rollouts/test_old_policy.py::test_with_one_update_a_rollout_nothing_is_scored_nor_clipped[dapo]
tests/trainer/rollouts/test_old_policy.py::test_with_one_update_a_rollout_nothing_is_scored_nor_clipped[dr_grpo]
tests/trainer/rollouts/test_old_policy.py::test_with_one_update_a_rollout_nothing_is_scored_nor_clipped[reinforce++]
tests/trainer/test_image_runs.py::test_stopped_and_continued_it_is_the_same_run[seq]
""".strip().splitlines()


# Files that take longest, in this order (`python -m benchmarks.durations` makes the table): they are run first, so that
# all workers end at about the same time.
LONG = """
tests/test_processes.py
tests/trainer/test_every_key.py
tests/models/experts/test_moe.py
tests/test_faults.py
tests/trainer/test_precision.py
tests/trainer/modes/test_microscope.py
tests/trainer/distributed/test_layouts.py
tests/trainer/strategies/test_grpo_runs.py
tests/models/cpu/test_bfloat16.py
tests/trainer/sweep/test_command.py
tests/trainer/test_main.py
tests/trainer/strategies/test_sft_runs.py
tests/trainer/test_position.py
tests/trainer/modes/test_verify.py
tests/trainer/generate/test_sampler.py
tests/trainer/planning/test_plan.py
tests/models/quantization/test_quantize.py
tests/models/test_vlm.py
tests/trainer/strategies/test_dpo_runs.py
tests/test_docs_commands.py
tests/models/test_transformer.py
tests/models/attention/test_dispatch.py
tests/models/test_lora.py
tests/trainer/test_image_runs.py
tests/trainer/strategies/test_own.py
tests/models/attention/test_gpu_kernels.py
tests/models/test_exactness.py
tests/trainer/test_update.py
tests/trainer/strategies/test_dpo.py
tests/trainer/rollouts/test_old_policy.py
tests/trainer/test_startup.py
tests/trainer/export/test_hugging_face.py
tests/trainer/strategies/test_chunked_loss.py
tests/trainer/strategies/test_grpo_model.py
tests/models/attention/test_gpu.py
tests/trainer/strategies/test_logprobs.py
tests/trainer/rollouts/test_rollout.py
tests/models/attention/test_cache.py
tests/models/hf/test_families.py
tests/models/attention/test_ring.py
tests/trainer/report/test_report.py
tests/trainer/telemetry/test_spikes.py
tests/models/hf/test_images.py
tests/trainer/compiler/test_compiled.py
tests/test_notebook.py
tests/trainer/speedrun/test_command.py
tests/trainer/telemetry/test_diagnostics.py
tests/trainer/generate/test_command.py
tests/test_docs.py
tests/evaluators/test_classify.py
tests/evaluators/test_preference.py
tests/trainer/optim/test_moments.py
tests/models/experts/test_all_to_all.py
tests/trainer/test_program.py
tests/trainer/generate/test_sampler_images.py
""".split()


def pytest_configure(config):
  if missing := [name for name in LONG if not (ROOT / name).exists()]:
    raise pytest.UsageError(f"LONG in tests/conftest.py names {missing}, which are no files.")
  config.option.loadscopereorder = False  # pytest-xdist would run the files with the most tests first


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
  order = {ROOT / name: number for number, name in enumerate(LONG)}
  items.sort(key=lambda item: order.get(item.path, len(order)))
  by_name = {item.nodeid: item for item in items}
  files = {item.path for item in items}
  for name in SLOW:
    if name in by_name:
      by_name[name].add_marker("slow")
    elif ROOT / name.partition("::")[0] in files and all("::" not in argument for argument in config.args):
      raise pytest.UsageError(f"SLOW in tests/conftest.py names {name}, which is no test.")
