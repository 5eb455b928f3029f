"""The plain loop, as the measure for the adapters."""

import pytest
import torch
import torchmetrics

import holdfast
from benchmarks.integrations.kills import compare, run


def test_a_plain_loop_resumes_exactly(tmp_path):
    uninterrupted = run("plain", "holdfast", tmp_path / "uninterrupted")
    killed = run("plain", "holdfast", tmp_path / "killed", kills=2, seed=1)
    result = compare(uninterrupted, killed)
    assert len(result.kills) == 2
    assert result.exact, result


@pytest.mark.filterwarnings("ignore:The ``compute`` method")  # after a resume torchmetrics knows of no update
@pytest.mark.parametrize("persistent", [True, False])
def test_torchmetrics_resume_if_they_are_persistent_and_are_reported_otherwise(tmp_path, caplog, persistent):
    def start():
        model = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 1), "error": torchmetrics.MeanMetric()})
        mean = torchmetrics.MeanMetric()
        for metric in (mean, model["error"]):
            metric.persistent(persistent)
        session = holdfast.Session("metrics", store=tmp_path, every=1, model=model, mean=mean)
        session.resume()
        return session, mean, model["error"]

    session, mean, error = start()
    for value in (1.0, 4.0):
        mean.update(value)
        error.update(2 * value)
        session.step()
    session.close()
    again, mean, error = start()
    again.close()
    reported = {each.message.split()[1] for each in caplog.records if "is a torchmetric" in each.message}
    if persistent:
        assert not reported
        assert (mean.compute(), error.compute()) == (2.5, 5.0)
    else:
        assert reported == {"model.error", "mean"}
