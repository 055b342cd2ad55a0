from experiments import pydoc
from mogrifier_jax.tuning import best_experiment


def test_the_source_gives_the_config_whatever_the_docstring_is():
    config = pydoc.get_config()
    docstring = 'The best trial of the study a"""b\\ ü\n\nTrial 1.\n'
    module = {}
    exec(best_experiment.write_source(config, docstring), module)
    assert module["get_config"]() == config
    assert module["get_config"]().get_type("schedule") is type(config.schedule)
    assert module["__doc__"] == "The best trial of the study a'''b\\ ü\n\nTrial 1.\n"
    other = pydoc.get_config("lstm")
    assert module["get_config"]() != other  # Control.
