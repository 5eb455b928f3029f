"""Lightning Fabric: a session takes what `fabric.setup` returns."""

import pytest
import torch
from lightning.fabric import Fabric

import holdfast
from benchmarks.integrations import job
from benchmarks.integrations.kills import compare, run


def test_a_loop_with_fabric_that_is_killed_resumes_exactly(tmp_path):
    uninterrupted = run("fabric", "holdfast", tmp_path / "uninterrupted")
    killed = run("fabric", "holdfast", tmp_path / "killed", kills=2, seed=1)
    result = compare(uninterrupted, killed)
    assert len(result.kills) == 2
    assert result.exact, result


@pytest.mark.filterwarnings("ignore")
def test_a_script_with_fabric_and_one_without_resume_from_each_other(tmp_path):
    model = job.classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    set_up = Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    with holdfast.Session("fabric", store=tmp_path, model=set_up[0], optimizer=set_up[1]) as session:
        session.resume()
        set_up[0](torch.randn(8, job.FEATURES)).mean().backward()
        set_up[1].step()
        session.step()
    plain = job.classifier()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    with holdfast.Session("fabric", store=tmp_path, model=plain, optimizer=plain_optimizer) as session:
        assert session.resume() == 1
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
