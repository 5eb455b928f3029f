"""`holdfast project`: manage projects on the server's machine."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast_server.accounts import projects
from holdfast_server.commands.database import (
    Db,
    Json,
    command_group,
    in_database,
    moment,
    print_rows,
    whoami,
)
from holdfast_server.core.principal import OPERATOR

Project = Annotated[str, typer.Argument(metavar="PROJECT", help="The project's name.")]

app = command_group(
    "Manage projects, on the machine of the server. People have roles in projects, and jobs belong to them."
)


@app.command()
def add(project: Project, db: Db = None) -> None:
    """Add a project. Jobs whose agents use a key of the project belong to it."""
    added = in_database(db, lambda database, now: projects.add(database, project, who=whoami(), now=now))
    print(f"Added project {added}. Create a key for its agents: holdfast token create NAME --project {added}")


@app.command("list")
def list_projects(db: Db = None, json: Json = False) -> None:
    """List projects with the number of their jobs and people."""
    rows = in_database(db, lambda database, _: projects.list_projects(database, OPERATOR))
    print_rows(
        rows, name="projects", json=json, header=("project", "jobs", "people", "created"),
        cells=lambda row: (row.name, str(row.jobs), str(row.members), moment(row.created_at)),
    )  # fmt: skip


@app.command("move-job")
def move_job(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")], project: Project, db: Db = None
) -> None:
    """Move a job to a project, whose roles then apply to it. Its agents need a key of that project."""
    in_database(db, lambda database, now: projects.move_job(database, job, project, who=whoami(), now=now))
    print(f"Moved {job} to project {project}. Its agents need a key of that project.")
