"""`holdfast project`: projects, on the server's machine."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast_server.accounts import projects
from holdfast_server.commands.database import Db, Json, in_database, moment, print_json, print_table, whoami
from holdfast_server.core.principal import OPERATOR

Project = Annotated[str, typer.Argument(metavar="PROJECT", help="The project's name.")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Projects, in which people have their roles and keys their jobs: on the server's machine.",
)


@app.command()
def add(project: Project, db: Db = None) -> None:
    """Add a project. Its jobs are those that report with a key of its own, or that are moved there."""
    added = in_database(db, lambda database, now: projects.add(database, project, who=whoami(), now=now))
    print(f"{added} is here. `holdfast token create NAME --project {added}` makes a key for its agents.")


@app.command("list")
def list_projects(db: Db = None, json: Json = False) -> None:
    """Which projects there are, and how many jobs and people each has."""
    rows = in_database(db, lambda database, _: projects.rows(database, OPERATOR))
    if json:
        print_json({"projects": rows})
        return
    table = [(row.name, str(row.jobs), str(row.members), moment(row.created_at)) for row in rows]
    print_table(("project", "jobs", "people", "made"), table)


@app.command("move-job")
def move_job(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")], project: Project, db: Db = None
) -> None:
    """Move a job to a project: who has a role there has it on the job; its agents need a key of that project."""
    in_database(db, lambda database, now: projects.move_job(database, job, project, who=whoami(), now=now))
    print(f"{job} belongs to {project}. Its agents' key has to be of that project too.")
