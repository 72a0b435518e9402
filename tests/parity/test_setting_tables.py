"""Every setting of TRL, OpenRLHF and verl has a hint, each hint is for one of them, and the documentation has both."""

from fnmatch import fnmatchcase

import pytest
import yaml

from lightning_realloc.setting_hints import VERL_HINTS, algorithm_topics, hint_for, hint_of_verl
from tests.parity import setting_tables
from tests.parity.known_settings import flags_of_openrlhf, installed_trl, keys_of_verl, known, trainers_of_trl

TRAINERS = "Arguments of the trainers"
EARLIER_TRL = "Experimental trainers and earlier versions of TRL"
TO_STORE = "run: python -m tests.parity.known_settings, then answer what the other tests name"


def test_the_stored_settings_of_trl_are_those_of_the_installed_package() -> None:
    pytest.importorskip("trl", reason="needs TRL: pip install 'lightning-realloc[parity]'")
    assert known()["trl"] == installed_trl(), TO_STORE


def test_every_setting_of_trl_has_a_hint_in_one_topic_and_earlier_names_are_apart() -> None:
    topics = setting_tables.topics_of_trl()
    answered = [name for topic, hints in topics.items() if topic not in (TRAINERS, EARLIER_TRL) for name in hints]
    assert sorted(answered) == sorted(trainers_of_trl())
    assert sorted(topics[TRAINERS]) == known()["trl"]["arguments"]
    assert topics[EARLIER_TRL].keys().isdisjoint([*answered, *topics[TRAINERS]])


def test_every_flag_of_openrlhf_has_a_hint_and_earlier_flags_are_apart() -> None:
    topics = algorithm_topics()
    flags = known()["openrlhf"]["settings"]
    assert sorted(topics[setting_tables.OPENRLHF]) == flags
    assert topics[setting_tables.EARLIER_OPENRLHF].keys().isdisjoint(flags)


def test_an_earlier_flag_of_openrlhf_has_the_hint_of_todays() -> None:
    assert hint_for("init_kl_coef") == hint_for("algo.kl.init_coef") == "kl_coef="
    assert hint_for("ptx_coef") == "not available: losses are of the rollout alone"


def test_every_key_of_verl_has_a_hint_and_every_pattern_fits_a_key() -> None:
    keys = known()["verl"]["settings"]
    assert [key for key in keys if hint_for(key) is None] == []
    assert [pattern for pattern in VERL_HINTS if not any(fnmatchcase(key, pattern) for key in keys)] == []


def test_a_key_of_verl_is_answered_by_the_first_pattern_that_fits() -> None:
    assert hint_of_verl("actor_rollout_ref.ref.fsdp_config.param_offload") == "offload: [reference] in the plan"
    assert hint_of_verl("critic.fsdp.param_offload") == "offload: [critic] in the plan"
    assert hint_for("data.train_batch_size") == "the data module's batch_size, prompts of an iteration over all ranks"
    assert hint_of_verl("rewards") is None  # a typo of ours, not a section of verl


def test_the_end_of_a_key_of_verl_is_answered_where_it_has_one_meaning_for_the_actor() -> None:
    assert hint_of_verl("lr") == hint_of_verl("actor_rollout_ref_actor_optim_lr") == "learning_rate="
    assert hint_of_verl("critic_optim_lr") == "critic_learning_rate= of PPO"
    assert hint_of_verl("param_offload") == "offload: [actor] in the plan"
    assert hint_of_verl("path") is None  # of a model or of a reward


def test_settings_are_read_from_a_script_and_from_a_configuration() -> None:
    script = 'for prefix in ("actor", "critic"):\n    p.add_argument(f"--{prefix}.adam.lr")\np.add_argument("--seed")'
    assert flags_of_openrlhf(script) == ["actor.adam.lr", "critic.adam.lr", "seed"]
    config = yaml.safe_load("{actor_rollout_ref: {actor: {_target_: A, lr: 1}, n: 1}, data: {kwargs: {}}}")
    assert list(keys_of_verl(config)) == ["actor.lr", "n", "data.kwargs"]


@pytest.mark.parametrize("page", setting_tables.PAGES)
def test_a_page_shows_the_hints(page: str) -> None:
    written = (setting_tables.DOCS / page).read_text()
    assert written == setting_tables.page_with_tables(page), "run: python -m tests.parity.setting_tables"
