"""The promises of docs/reliability.md, and the tests that show each.

    python -m tests.promises        # write the page's table again

A name is that of a test below tests/ (`run/test_lock.py::test_x`), of a file of tests, of an attack ("attack: slow
requests", a line of `python -m tests.attack`) or of a program ("python -m tests.soak").
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
HEADING = "## Which test shows it\n"

# Section of the page -> claim -> names of its tests.
PROMISES: dict[str, dict[str, list[str]]] = {
    "Stopping and resuming": {
        "SIGTERM saves, exits with 75, and the run resumes": [
            "whole_runs/test_resume.py::test_sigterm_saves_and_resumes",
            "whole_runs/test_resume.py::test_sigterm_saves_where_a_damaged_checkpoint_of_the_step_is",
        ],
        "a notice to one rank is enough for all": [
            "whole_runs/test_train.py::test_two_ranks_train_and_resume_as_one_run"
        ],
        "torchrun passes SIGTERM on and waits as long as it was told": [
            "test_distributed.py::test_torchrun_passes_sigterm_on_and_waits_as_long_as_it_was_told"
        ],
        "an evaluation that SIGTERM ended continues from its journal": ["attack: SIGTERM in `vlm-rl eval`"],
        "Ctrl-C keeps the step in progress; twice, it says what is lost and how to continue": [
            "whole_runs/test_resume.py::test_ctrl_c_keeps_the_step_in_progress_where_no_checkpoint_is_due",
            "whole_runs/test_resume.py::test_ctrl_c_twice_says_what_is_lost_and_how_to_go_on",
        ],
        "after a kill at any moment the resumed run equals the uninterrupted one": [
            "whole_runs/test_resume.py::test_killed_again_and_again",
            "whole_runs/test_resume.py::test_killed_at_a_rotating_sample_of_all_points_and_resumed",
            "python -m tests.crash_walk",
        ],
        "an error of one rank loses no checkpoint": [
            "whole_runs/test_async_save.py::test_another_error_of_a_single_rank_waits_for_it_too"
        ],
        "a mistake of the user is one message, and nothing is written": [
            "commands/test_cli.py::test_what_training_refuses_at_once",
            "whole_runs/test_train.py::test_a_bad_row_is_refused_before_anything_is_written",
            "session/test_preflight.py::test_a_mistake_is_answered_before_a_heavy_import",
        ],
        "a training set that was prepared again stops a resume": [
            "whole_runs/test_resume.py::test_a_set_that_was_prepared_again_stops_a_resume"
        ],
        "nodes that were given different configurations do not start": [
            "whole_runs/test_train.py::test_ranks_with_different_configurations_do_not_start",
            "evaluation/test_eval_kill.py::test_ranks_that_are_asked_for_different_things_do_not_start",
        ],
        "a rollout server that is killed changes no response, score or weight": [
            "samplers/test_servers.py::test_a_server_killed_during_a_push_drops_out",
            "python -m tests.server_kills",
        ],
        "a run that no rollout server works for saves and exits with 75": [
            "whole_runs/test_train.py::test_a_run_that_no_server_serves_saves_and_stops",
            "whole_runs/test_train.py::test_a_run_whose_servers_go_in_an_evaluation_saves_and_stops",
            "whole_runs/test_train.py::test_servers_that_one_of_two_ranks_loses_in_an_evaluation_stop_both",
        ],
        "a full disk or a lost folder is a message with the file": [
            "run/test_directory.py::test_a_full_or_a_read_only_disk_is_a_message_with_the_file",
            "attack: a disk that is full at the metrics",
            "attack: a run folder that vanishes in an update",
        ],
        "a disk that fails in any way, a file system that turns read-only and too many open files are one too": [
            "session/test_preflight.py::test_what_the_disk_refuses_of_the_log_ends_the_run_in_a_message",
            "attack: a disk that fails (EIO) at the log",
            "attack: a quota that ends (EDQUOT) in a checkpoint",
            "attack: a file system that turns read-only (EROFS) at the second step",
            "attack: no more open files from an update on",
        ],
        "a fault of the program keeps its traceback": [
            "commands/test_cli.py::test_our_own_faults_keep_their_traceback"
        ],
        "the order of prompts continues where it stopped": [
            "rollouts/test_prompt_order.py::test_a_resumed_order_continues_where_it_stopped"
        ],
        "a response depends on its seed, not on its batch": [
            "samplers/test_base.py::test_response_seeds_are_63_bits_and_all_different",
            "samplers/test_samplers.py::test_a_response_does_not_depend_on_its_neighbours",
        ],
        "HA-DW's belief, groups carried over and batches begun ahead are restored": [
            "test_hadw.py::test_a_belief_restored_from_json_continues_alike",
            "rollouts/test_carry_over.py::test_a_stopped_run_goes_on_as_if_it_had_not_been",
            "samplers/test_ahead_servers.py::test_a_stopped_run_continues_with_the_batch_that_it_had_begun",
        ],
        "a log that was cut at any byte continues; of a repeated step the last attempt counts": [
            "run/test_directory.py::test_a_log_cut_at_any_byte_reads_and_continues",
            "run/test_directory.py::test_metrics_of_the_last_attempt_win",
        ],
        "a damaged line of a log is left out, a damaged summary named": [
            "run/test_directory.py::test_a_damaged_line_of_metrics_is_left_out",
            "run/test_directory.py::test_a_damaged_summary_is_named",
            "attack: damaged logs on a resume",
        ],
        "another number of ranks has the same weights and moments, and loses no prompt": [
            "learner/test_sharding.py::test_two_ranks_then_one_then_two_have_the_same_weights_and_moments",
            "whole_runs/test_train.py::test_two_ranks_train_and_resume_as_one_run",
        ],
        "a resume in less memory is the same run, and one with another sampler continues": [
            "session/test_late_memory.py::test_a_killed_run_resumes_in_less_memory_and_with_another_sampler"
        ],
        "an update in which memory ends is made again in shorter rows, or the run ends in the command that resumes": [
            "session/test_late_memory.py::test_a_step_in_which_memory_ends_is_made_again_in_shorter_rows",
            "session/test_late_memory.py::test_gradients_of_an_update_that_failed_are_forgotten",
            "session/test_late_memory.py::test_memory_that_ends_twice_ends_in_the_command",
        ],
        "a new run starts from another's weights and optimizer, and is refused where they do not fit": [
            "session/test_late_memory.py::test_a_new_run_starts_from_another_s_weights_and_optimizer"
        ],
        "masters and moments go from any ZeRO stage to any other bit for bit": [
            "learner/test_sharding.py::test_every_stage_reads_the_masters_and_moments_of_every_other"
        ],
        "a resume may change the listed keys and no other": [
            "test_reliability_page.py::test_a_resume_may_change_what_the_page_lists_and_nothing_else",
            "whole_runs/test_train.py::test_a_resume_with_a_different_key_is_refused",
            "run/test_configurations.py::test_what_a_resume_changes_is_the_run_s_from_then_on",
        ],
        "a clock that goes back changes nothing": ["attack: a clock that goes back by an hour in a step"],
        "2,000 steps and 400 visits of the demo do not grow": ["python -m tests.soak"],
    },
    "One writer": {
        "a second process is refused by host, process id and time": [
            "whole_runs/test_resume.py::test_a_run_that_another_process_writes_is_refused_by_name",
            "run/test_lock.py::test_a_second_process_is_refused_by_name_until_the_first_ends",
            "run/test_lock.py::test_two_locks_of_one_process_exclude_each_other",
            "attack: an evaluation into a folder that another process writes into",
        ],
        "nothing has to be cleaned up after a crash": ["run/test_lock.py::test_a_killed_holder_holds_nothing"],
        "a lease works across machines, whatever their clocks say": [
            "run/test_lock.py::test_a_lease_that_another_machine_renews_is_refused_whatever_its_clock_says",
            "run/test_lock.py::test_an_old_lease_of_another_machine_is_taken_whatever_its_clock_says",
            "whole_runs/test_two_machines.py",
        ],
        "a trainer that lost its lease stops at the end of its step": [
            "run/test_lock.py::test_a_lease_is_renewed_and_one_that_was_taken_over_stops_its_holder",
            "whole_runs/test_train.py::test_a_trainer_that_lost_its_lease_stops_at_the_end_of_its_step",
        ],
    },
    "Checkpoints": {
        "a checkpoint is whole or not there, whatever is killed": [
            "run/test_checkpoint.py::test_all_is_synced_before_it_has_its_name_and_the_name_before_anything_goes",
            "run/test_checkpoint.py::test_a_kill_at_any_call_of_a_save_or_prune_leaves_the_last_safe_checkpoint",
            "run/test_checkpoint.py::test_kills_at_random_moments_lose_nothing_that_was_safe",
            "run/test_checkpoint.py::test_a_file_is_hashed_while_it_is_written",
        ],
        "damage to any file is found, and the checkpoint before it taken": [
            "run/test_checkpoint.py::test_damage_to_any_file_is_found_and_the_older_checkpoint_taken",
            "attack: a NaN in the newest checkpoint, whose manifest matches",
        ],
        "where no checkpoint verifies a resume refuses, and does not start over": [
            "run/test_checkpoint.py::test_a_recovery_refuses_where_there_are_checkpoints_and_none_verifies",
            "attack: a resume where every checkpoint is damaged",
        ],
        "pruning keeps the last, the multiples and the best, and counts no damaged one": [
            "run/test_checkpoint.py::test_prune_keeps_the_last_the_best_and_every_mth",
            "whole_runs/test_resume.py::test_the_best_of_the_saved_steps_is_kept",
            "run/test_checkpoint.py::test_a_damaged_checkpoint_takes_no_place_of_a_good_one",
            "run/test_checkpoint.py::test_weights_that_a_resume_found_not_finite_do_not_count",
            "run/test_checkpoint.py::test_a_damaged_milestone_stays_and_is_named_once",
        ],
        "a disk without room is refused before the first step and before each save": [
            "whole_runs/test_train.py::test_a_disk_without_room_is_refused_before_anything_is_written",
            "learner/test_checkpoint_size.py::test_what_is_there_already_needs_no_more_room",
            "learner/test_checkpoint_size.py::test_milestones_that_may_be_moved_away_are_a_warning",
            "run/test_checkpoint.py::test_a_save_that_will_not_fit_is_refused_before_it_writes",
            "run/test_checkpoint.py::test_the_first_save_that_will_not_fit_is_refused_by_its_planned_size",
        ],
        "a folder that the ranks do not share is refused by the first save": [
            "run/test_checkpoint.py::test_a_shard_that_a_rank_wrote_and_that_is_not_there_stops_the_commit"
        ],
        "a save shows its progress": ["learner/test_save_progress.py"],
        "an asynchronous save holds the state of its own step": [
            "learner/test_saving.py::test_later_steps_do_not_leak_into_it",
            "whole_runs/test_async_save.py::test_it_equals_the_run_that_waits",
        ],
        "SIGTERM and a failed write end an asynchronous save as one that waits": [
            "whole_runs/test_async_save.py::test_sigterm_waits_for_what_is_being_written",
            "whole_runs/test_async_save.py::test_a_folder_that_vanishes_ends_the_run_with_a_message",
        ],
        "a kill or an error in an asynchronous save leaves the checkpoint before": [
            "whole_runs/test_async_save.py::test_killed_while_the_thread_writes_the_one_before_is_resumed",
            "whole_runs/test_async_save.py::test_killed_in_the_thread_s_own_writes_and_resumed",
            "whole_runs/test_async_save.py::test_an_error_on_one_of_two_ranks_leaves_the_one_before",
        ],
        "from_pretrained and vLLM open a checkpoint as it is; one of adapters holds only these": [
            "whole_runs/test_train.py::test_a_checkpoint_opens_as_it_is",
            "whole_runs/test_family_run.py::test_a_run_of_a_vision_model",
            "whole_runs/test_lora_runs.py::test_a_checkpoint_holds_the_adapters_alone",
        ],
        "the weights that are checked are those that an engine loads": [
            "model_files/test_model_folder.py::test_what_leads_a_loader_to_unchecked_weights_is_refused",
            "samplers/test_samplers.py::test_weights_that_a_loader_took_from_elsewhere_are_found",
            "samplers/test_samplers.py::test_every_family_on_vllm",
        ],
        "DeepSpeed's state loads without running code": [
            "learner/test_learner.py::test_a_saved_state_loads_without_running_code",
            "attack: code in the optimizer's state, whose manifest matches",
        ],
        "a checkpoint that is opened as a model is compared with its manifest": [
            "run/test_checkpoint.py::test_a_changed_bit_is_found_where_a_checkpoint_is_opened_as_a_model",
            "run/test_checkpoint.py::test_a_file_is_read_once_until_it_changes",
            "run/test_checkpoint.py::test_a_folder_without_a_manifest_is_not_verified",
            "attack: a checkpoint with a flipped bit",
        ],
    },
    "Reward functions and judges": {
        "a function that ends, crashes, forks or hangs harms only its own values": [
            "rewards/test_reward.py::test_a_function_that_goes_wrong_is_named_with_the_problem",
            "rewards/test_reward.py::test_a_function_that_forks_answers_once",
            "rewards/test_reward.py::test_a_function_that_hangs_is_stopped_by_its_limit_and_by_the_run",
        ],
        "SIGTERM and Ctrl-C work while a function hangs, and leave no process": [
            "attack: SIGTERM while a reward function hangs",
            "attack: Ctrl-C while a reward function hangs",
        ],
        "a failure costs the responses in question, or stops the run where you say so": [
            "rewards/test_functions.py::test_a_failure_follows_the_undecided_policy",
            "rewards/test_functions.py::test_a_function_may_stop_the_run_instead",
            "rewards/test_runs.py::test_a_run_survives_a_hostile_judge_and_broken_functions",
        ],
        "a judge's reply is bounded, whatever its server does": [
            "chat_endpoint/test_batch.py::test_each_fault_is_named_and_kept_from_the_cache"
        ],
        "cached replies are whole or not there": [
            "chat_endpoint/test_batch.py::test_two_writers_leave_a_whole_reply",
            "chat_endpoint/test_batch.py::test_a_damaged_reply_is_asked_for_again",
        ],
        "the API key is in no message and in no file": [
            "chat_endpoint/test_client.py::test_the_key_is_sent_and_no_message_holds_a_part_of_it",
            "chat_endpoint/test_batch.py::test_the_key_is_in_no_file",
        ],
    },
    "What stops a run by itself": {
        "weights that did not arrive, or arrived in the wrong place (StaleWeightsError)": [
            "samplers/test_samplers.py::test_a_skipped_sync_is_found",
            "samplers/test_samplers.py::test_a_dropped_tensor_is_found",
            "samplers/test_samplers.py::test_a_tensor_in_the_wrong_place_is_found",
            "whole_runs/test_train.py::test_a_stale_sampler_stops_the_run",
        ],
        "an engine with changed buffers, old keys and values, or other log-probs": [
            "samplers/test_samplers.py::test_a_changed_buffer_is_found_by_name",
            "samplers/test_samplers.py::test_keys_and_values_of_earlier_weights_are_never_kept",
            "whole_runs/test_train.py::test_a_sampler_that_computes_differently_stops_the_run",
        ],
        "a rollout server with other weights": [
            "samplers/test_servers.py::test_other_weights_are_noticed",
            "samplers/test_server_proofs.py",
        ],
        "a gap between sampler and learner, before the update is made (GapError)": [
            "whole_runs/test_train.py::test_a_gap_between_sampler_and_learner_stops_the_run",
            "learner/test_learner.py::test_what_is_raised_before_the_step_leaves_the_weights_alone",
        ],
        "bad gradients are not applied, and too many in a row stop (GuardAbortError)": [
            "learner/test_learner.py::test_a_bad_gradient_is_not_applied",
            "learner/test_learner.py::test_too_many_bad_gradients_in_a_row_abort_on_every_rank",
            "learner/test_guard.py",
        ],
        "NaN is never saved (NonFiniteError)": [
            "learner/test_learner.py::test_a_nan_on_any_rank_is_known_to_all",
            "attack: a NaN in a weight when a checkpoint is due",
            "attack: a NaN in Adam's second moments when a checkpoint is due",
        ],
        "a prompt that was lost or counted twice": [
            "rollouts/test_prompt_order.py::test_a_ledger_that_does_not_close_stops_the_run",
            "rollouts/test_collect.py::test_a_prompt_that_was_lost_ends_the_step",
        ],
        "a rank that fails ends all, also those that would wait for it": [
            "whole_runs/test_train.py::test_one_rank_that_raises_ends_all",
            "session/test_late_memory.py::test_a_rank_out_of_memory_ends_all_with_a_message",
        ],
        "a rank that hangs is seen, and ends the run; what is slow is left alone": [
            "session/test_late_memory.py::test_a_rank_that_hangs_is_seen_and_ends_the_run",
            "session/test_late_memory.py::test_a_run_that_is_slow_but_alive_is_left_alone",
        ],
    },
    "Input": {
        "images: bounded before decoding, the same pixels for model and engine": [
            "data/test_images.py",
            "data/test_vision.py",
            "data/test_prompts.py::test_ids_and_pixels_are_the_processors_own",
            "samplers/test_samplers.py::test_log_probs_equal_a_plain_forward",
        ],
        "addresses and outside paths in data are never opened": [
            "data/test_damaged_sets.py",
            "data_prep/test_own_data.py::test_an_image_outside_the_folder_is_not_read",
        ],
        "a damaged prepared set is named by file and row": ["data/test_damaged_sets.py"],
        "preparation drops and counts rows that it cannot read": [
            "data_prep/test_bad_input.py::test_good_rows_are_byte_equal_with_and_without_bad_ones"
        ],
        "prompts are never cut": [
            "whole_runs/test_train.py::test_prompts_above_the_limit_are_left_out_and_counted",
            "attack: problems of 100,000 characters",
        ],
        "control tokens in data stay text": ["data/test_prompts.py::test_control_tokens_in_data_stay_text"],
        "training on a benchmark is refused or stamped": [
            "data/test_sets.py::test_rows_of_a_benchmark_are_refused",
            "report/test_report.py::test_two_runs_share_a_page_and_contamination_is_stamped",
            "whole_runs/test_train.py::test_evaluating_on_what_was_trained_on_is_refused",
        ],
        "a model folder brings no code and no pickle": [
            "run/test_checkpoint.py::test_pickles_are_refused_by_name",
            "run/test_checkpoint.py::test_code_that_comes_with_a_model_is_refused",
            "attack: installed packages that load code of a hub, or that 4 bits are made of",
            "test_architecture.py::test_no_text_is_run_as_code_and_no_pickle_opened",
        ],
        "its tensors are exactly the model's, and its chat template costs no marks": [
            "model_files/test_model_folder.py",
            "data/test_prompts.py::test_a_chat_template_that_would_lose_marks_is_refused",
        ],
        "a model that packed rows would compute wrongly is refused": [
            "learner/test_families.py::test_what_packed_rows_compute_wrongly_is_refused_twice",
            "learner/test_families.py::test_the_self_check_sees_a_forgotten_window",
            "learner/test_families.py::test_what_no_row_computes_exactly_is_refused",
            "learner/test_families.py::test_a_type_that_is_not_listed_trains_in_padded_rows",
        ],
        "a model that is not supported is one message in every command": [
            "test_unsupported_models.py",
            "doctor/test_model.py",
        ],
        "every key of a configuration is known, read, and never executed": [
            "config/test_config.py",
            "whole_runs/test_train.py::test_every_key_is_read",
        ],
        "files, links and requests give a value or one message": ["test_fuzz_readers.py"],
        "a pipe or a device in the place of a file is never opened": ["untrusted/test_plain_files.py"],
    },
    "Grading": {
        "no answer is executed": [
            "grading/test_grader.py::test_code_in_an_answer_is_only_text",
            "grading/test_grader.py::test_no_code_path_from_model_text",
        ],
        "CPU time and memory of a comparison are bounded": [
            "grading/test_symbolic.py::test_cpu_time_decides_and_good_queries_survive",
            "grading/test_symbolic.py::test_a_memory_bomb_meets_its_limit_and_harms_nothing_else",
        ],
        "an answer changes no other answer's verdict": [
            "grading/test_grader_limits.py::test_hostile_answers_cost_nothing_but_their_own_verdict"
        ],
        "what is not compared is never a silent `wrong`": [
            "grading/test_grader_limits.py::test_a_comparison_without_a_result_is_a_verdict_of_its_own",
            "attack: random LaTeX as an answer",
        ],
        "hostile answers are never `correct`": [
            "attack: hostile answers",
            "attack: answers that ask to be accepted",
        ],
        "a different digit, sign or unit is never accepted": [
            "grading/test_grading_identities.py",
            "attack: golds with one thing changed",
        ],
        "golds that fail the grader are dropped or flagged": [
            "grading/test_grader.py::test_a_gold_is_checked_against_its_other_spellings",
            "data_prep/test_readers.py::test_golds_that_fail_the_grader_are_dropped_from_training_and_flagged_in_tests",
        ],
    },
    "The demo as a server": {
        "no request makes it read, copy or fetch what the request names": [
            "demo/test_request_guard.py::test_no_event_makes_the_server_read_or_fetch_what_its_body_names",
            "demo/test_request_guard.py::test_without_the_guard_gradio_itself_refuses_a_path_outside",
            "test_fuzz_readers.py::test_bodies_of_the_demo",
        ],
        "malformed requests are refused without a line in the log": [
            "demo/test_request_guard.py::test_malformed_events_are_refused_without_a_line_in_the_log",
            "demo/test_request_guard.py::test_odd_addresses_and_headers_are_answered_without_a_line_in_the_log",
            "demo/test_server.py::test_malformed_and_broken_off_requests_leave_no_line_in_the_log",
        ],
        "connections are bounded in number, heads and bodies in time and size": [
            "demo/test_server.py",
            "demo/test_page.py::test_large_bodies_are_refused_before_they_are_read",
            "attack: 10,000 connections",
            "attack: slow requests",
        ],
        "text of a run, a model, an endpoint or an address never acts on the page": ["demo/test_hostile.py"],
        "what others can reach asks for a token on every route": [
            "demo/test_access.py::test_every_route_is_behind_the_token",
            "demo/test_access.py::test_nothing_that_others_reach_goes_without_a_token",
        ],
        "odd and half-written files of a run are shown or named": [
            "demo/test_odd_runs.py",
            "attack: a run written while the demo shows it",
        ],
        "broken runs and replies that no page can hold leave the others as they are": [
            "attack: broken runs beside a good one",
            "attack: a reply of a model server that no page can hold",
        ],
    },
    "Tools and many turns": {
        "sampled tokens are never decoded and encoded again": [
            "samplers/test_episode_batch.py::test_the_engine_gets_the_very_ids_that_it_drew"
        ],
        "an observed image is expanded once, and is in ids and features alike": [
            "samplers/test_episode_batch.py::test_each_image_is_one_placeholder_for_the_engine_and_expanded_once_for_the_learner",
            "samplers/test_episodes.py::test_log_probs_are_those_of_the_unmodified_model",
            "learner/test_episode_rows.py::test_rows_of_episodes_equal_the_unmodified_model",
        ],
        "only sampled tokens are trained and counted": ["learner/test_episode_rows.py::test_a_row_by_hand"],
        "what a tool says holds no control token, and is no answer": [
            "data/test_turns.py::test_control_tokens_of_a_tool_are_letters",
            "rewards/test_reward.py::test_what_a_tool_says_is_no_answer",
        ],
        "a tool that raises, hangs, ends its process or returns anything costs one turn": [
            "environments/test_host.py::test_a_bad_environment_gives_an_error_turn_and_the_episode_goes_on"
        ],
        "a stopped run of episodes resumes bit for bit": [
            "whole_runs/test_episodes.py::test_a_run_of_episodes_resumes_bit_for_bit"
        ],
    },
}


def names() -> Iterator[str]:
    """Yield the name of each test that the promises give."""
    for claims in PROMISES.values():
        for tests in claims.values():
            yield from tests


@cache
def tests_in(file: Path) -> dict[str, bool]:
    """Return the names of a file's test functions, and whether each is slow."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    marks = [
        ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n.targets[0])
    ]
    return {
        node.name: any("mark.slow" in mark for mark in (*marks, *map(ast.unparse, node.decorator_list)))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def command_of(name: str) -> str:
    """Return the command that runs what has this name. Raises LookupError where there is nothing of that name."""
    from tests.attack import ATTACKS

    if name.startswith("python -m "):
        module = ROOT / name.split()[2].replace(".", "/")
        if not (module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()):
            raise LookupError(name)
        made = {"tests.soak": "make soak", "tests.crash_walk": "make crash", "tests.server_kills": "make crash"}
        return made[name.removeprefix("python -m ")]
    if name.startswith("attack: "):
        slow = [attack.slow for attack in ATTACKS if attack.name == name.removeprefix("attack: ")]
    else:
        path, _, test = name.partition("::")
        file = ROOT / "tests" / path
        known = tests_in(file) if file.is_file() else {}
        slow = [known[test]] if test in known else [*known.values()] if not test else []
    if not slow:
        raise LookupError(name)
    return "make test-slow" if all(slow) else "make test"


def table() -> str:
    """Return the page's table: each claim, its tests, and the commands that run them."""
    lines = []
    for section, claims in PROMISES.items():
        lines += [f"\n**{section}**\n", "| promise | tests | run by |", "|---|---|---|"]
        for claim, tests in claims.items():
            shown = ", ".join(f"*{name}*" if name.startswith("attack: ") else f"`{name}`" for name in tests)
            commands = ", ".join(f"`{command}`" for command in sorted({command_of(name) for name in tests}))
            lines.append(f"| {claim} | {shown} | {commands} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the table of today."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index("\n**", text.index(HEADING))
    end = text.index("\n## ", start)
    return text[:start] + table() + text[end:]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
