"""Codes of errors: each place has one, a code has one class, and tests go by codes."""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.pages import builder

from treegraft.core.errors import EngineError, SettingError, TreegraftError, about
from treegraft.core.import_paths import load_object

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def raised() -> list[Any]:
    """Every place where an error of ours is made. Here and not at import: reading the package takes
    seconds, in each process that collects the tests."""
    return builder().raised()


READ = """
policy/test_imitation test_a_missing_file_is_told_with_the_nearest_one_that_exists
rollout/test_messages test_an_answer_after_the_question_is_told_where_it_belongs
rollout/test_messages test_an_unknown_role_is_told_with_the_known_ones
distributed/test_plan test_a_rank_whose_leader_is_gone_ends
extras/test_verl test_no_recipe_and_other_versions_are_refused
extras/test_verl test_refused_among_verls_arguments
extras/test_verl_rows test_kl_beside_unequal_weights_is_refused
extras/test_verl_rows test_other_versions_of_verl_are_refused
extras/test_verl_rows test_refused_in_a_recipe
extras/test_verl_rows test_sampled_entropies_are_refused_beside_grafts
distributed/test_own_ranks test_a_rank_that_never_comes_is_named
distributed/test_own_ranks test_python_starts_them_as_well
distributed/test_plan test_the_number_of_ranks_is_checked
extras/test_trl_vllm test_refused_beside_vllm
extras/test_trl_vllm test_servers_without_the_log_probabilities
core/test_addresses test_a_recipe_with_a_secret_is_refused_and_the_error_does_not_tell_it
core/test_addresses test_a_variable_is_filled_in
runs/test_changed_runs test_metrics_that_lost_bytes_before_every_checkpoint_are_refused
runs/test_changed_runs test_only_a_whole_checkpoint_is_named_as_a_way_out
runs/test_changed_runs test_the_earlier_checkpoint_is_a_way_out
settings/test_config test_dots_within_texts_comments_and_numbers_are_no_keys
tasks/test_datasets test_a_missing_column_is_sought_by_contents_and_by_usual_names
runs/test_record test_a_run_keeps_the_trees_of_its_latest_updates
policy/test_served test_a_session_takes_the_engine_and_the_version_of_weights_that_somebody_moved
test_train test_few_rows_that_the_format_cannot_write_are_left_out
runs/test_trust test_another_user_is_asked
runs/test_trust test_one_byte_that_has_changed_is_asked_about
runs/test_trust test_what_is_no_folder_of_ours_is_not_trusted
view/test_view_trust test_a_link_that_is_changed_between_look_and_opening
cluster/test_refusals test_a_machine_is_not_like_that_of_rank_0
cluster/test_wire test_a_tree_that_ends_its_engines_is_named
cluster/test_wire test_errors_of_ours_arrive_with_their_kind
cluster/test_wire test_the_last_engine_is_waited_for_however_long_it_had_lived
distributed/test_plan test_models_that_several_ranks_cannot_learn_are_refused
extras/test_aepo test_a_rule_of_the_user_may_write_factors
project/test_example_environments test_the_former_names_say_where_it_is
extras/test_trl test_a_tree_with_more_leaves_than_rows_is_refused
extras/test_trl test_refused_in_a_recipe
extras/test_trl test_refused_among_trls_arguments
extras/test_trl test_what_the_recipe_says_is_refused_beside_it
cli/test_bad_input test_a_hub_that_does_not_answer_is_asked_once
extras/test_browse test_a_page_that_takes_too_long_or_kills_its_reader_costs_that_page_only
traces/test_buffer test_another_encoder_is_refused_and_both_are_named
cli/test_cli test_an_empty_question_is_refused
tools/test_corpus_search test_rows_are_read_by_their_place
extras/test_data_check test_files_that_cannot_be_used_are_refused_first
tasks/test_datasets test_csv_has_texts_below_a_line_of_names
tools/test_embed test_an_encoder_that_is_not_there_says_so
policy/test_engine test_memory_that_does_not_come_back_fails_what_runs_and_not_the_engine
tools/test_environments test_the_whole_result_is_compared_not_what_was_shown
extras/test_eval_suites test_two_evaluations_item_by_item
explore/test_explore test_an_explorer_of_your_own_without_a_member_is_refused_by_name
policy/test_flex test_a_path_too_long_for_a_mask_is_refused_on_a_gpu
rollout/test_format_chat test_a_template_that_cannot_be_appended_to_is_refused_with_the_reason
policy/test_imitation test_best_of_each_question_by_reward_then_by_length
extras/test_mcp test_settings_that_make_no_server
extras/test_mcp test_faults_within_a_list_of_tables_name_the_setting
core/test_packages test_the_sentence_names_package_and_command
core/test_packages test_a_run_says_what_it_lacks_before_any_work
core/test_plugins test_an_import_path_that_leads_nowhere_is_told_when_it_is_used
extras/test_python_backend test_where_there_is_neither_the_error_says_what_to_install
runs/test_record test_damaged_lines_are_named
extras/test_remote_search test_a_server_that_is_not_there_is_noticed_before_the_run
extras/test_report test_wrong_options_are_refused
runs/test_result test_a_conversation_goes_on
test_resume test_two_processes_do_not_share_a_run
tasks/test_sampler test_a_sampler_of_your_own
tools/test_search_tool test_variables_in_the_path_are_expanded
tasks/test_search_world test_questions_of_others_are_refused_with_an_example
extras/test_study test_a_study_builds_on_another_file
tools/test_tools test_functions_may_declare_capability_and_cacheability
test_train test_a_skipped_publish_is_found_by_version_or_checksum
"""
"""Tests that read sentences of ours: some of each part, since a sentence is a product, and those
whose point is a name or a reason within one."""
OWN = """
project/test_bench test_parts_are_chosen_by_name_or_by_their_first_words
project/test_bench test_rows_are_kept_and_replaced
project/test_bench test_a_peer_answers_and_its_death_is_told
project/test_bench test_a_peers_python_is_typed_or_in_the_environment
project/test_bench test_the_parts_are_listed_and_a_wrong_one_is_refused
policy/test_imitation test_law_16_demonstrations_do_not_change_unseen
policy/test_imitation test_an_interrupted_warmup_keeps_its_evaluations
tools/test_toolbox_services test_a_dead_service_is_unavailable_and_a_local_tool_is_tried_once
tools/test_toolbox_services test_retries_end_before_the_deadline_as_a_failure_of_the_service
tools/test_tools test_an_unavailable_service_is_raised
test_train test_a_run_that_fails_before_its_first_checkpoint_begins_anew
"""
"""Tests of errors that they, or benchmarks, raise themselves."""


def test_every_error_has_a_code(raised: list[Any]) -> None:
    shape = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
    assert raised
    assert [one.place for one in raised if not shape.fullmatch(one.code)] == []


def test_a_code_belongs_to_one_class(raised: list[Any]) -> None:
    kinds: dict[str, set[str]] = {}
    for one in raised:
        kinds.setdefault(one.code, set()).add(one.kind)
    assert {code: names for code, names in kinds.items() if len(names) > 1} == {}


def expectations() -> Iterator[tuple[str, str, ast.Call]]:
    """Yields file, test or function, and each call of `pytest.raises` and `raises_code`."""
    for path in sorted({*TESTS.rglob("*.py")} - {Path(__file__)}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for top in tree.body:
            for call in ast.walk(top):
                if not isinstance(call, ast.Call):
                    continue
                called = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
                if called in ("raises", "raises_code"):
                    name = str(path.relative_to(TESTS).with_suffix(""))
                    yield name, getattr(top, "name", ""), call


def test_tests_go_by_codes(raised: list[Any]) -> None:
    """English can be edited: messages of ours are read in the tests that `READ` lists alone."""
    codes = {one.code for one in raised}
    kinds = {one.kind for one in raised} | {"TreegraftError"}
    reading, unknown = set[str](), list[str]()
    for file, test, call in expectations():
        first = call.args[0] if call.args else None
        of_ours = ast.unparse(call.func) == "raises_code"
        if of_ours and isinstance(first, ast.Constant) and first.value not in codes:
            unknown.append(f"{file}::{test}: {first.value}")
        if first is not None and not of_ours:
            of_ours = bool(kinds & {ast.unparse(one) for one in ast.walk(first)})
        has_text = any(one.arg == "match" for one in call.keywords)
        if of_ours and has_text:
            reading.add(f"{file} {test}")
    assert unknown == []
    listed = {*READ.split("\n"), *OWN.split("\n")} - {""}
    assert reading - listed == set(), "name the code, or list the test in READ"
    assert listed - reading == set(), "listed, and reads no message"


def test_what_is_expected_is_told_where_it_does_not_come() -> None:
    with pytest.raises(AssertionError, match="expected the code b, got a: text"), raises_code("b"):
        raise SettingError("text", code="a")
    with pytest.raises(AssertionError, match="are not in"), raises_code("a", "run.seed"):
        raise SettingError("text", code="a", settings=["run.dir"])
    with raises_code("a", "run.seed", match="^te"):
        raise SettingError("text", code="a", settings=["run.seed", "run.dir"])


def test_an_error_keeps_its_code_between_processes() -> None:
    made = EngineError("text", code="engine-died", settings=["engine.kind"])
    found = pickle.loads(pickle.dumps(made))
    assert (type(found), str(found)) == (EngineError, "text")
    assert (found.code, found.settings) == ("engine-died", ("engine.kind",))
    with pytest.raises(TreegraftError) as caught, about("run.seed"):
        raise SettingError("text", code="port-unusable")
    assert (caught.value.code, caught.value.settings) == ("port-unusable", ("run.seed",))


def test_an_error_of_a_cluster_s_actor_keeps_its_code() -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    reply = load_object("treegraft.extras.ray.actors:error_reply")
    value_of = load_object("treegraft.extras.ray.actors:value_of")
    text = reply(EngineError("text", code="engine-died"))
    assert json.loads(text) == {"error": "EngineError", "code": "engine-died", "text": "text"}
    with raises_code("engine-died", kind=EngineError, match="^text$"):
        value_of(text)


def test_the_page_of_codes_has_them_all(raised: list[Any]) -> None:
    page = builder().errors_page()
    assert {one.code for one in raised if f"| `{one.code}` |" not in page} == set()
