"""Decisions on each pass: drafts, width, pipeline and waits; the sidecar of a request."""

from sglang_qspec.policy.answer_kind import AnswerKind
from sglang_qspec.policy.credit import Credit, FirstTokens
from sglang_qspec.policy.draft_trials import DraftTrials
from sglang_qspec.policy.last_requests import LastRequests, passes_left
from sglang_qspec.policy.pass_times import GPU_COST, PassCost, PassTimes
from sglang_qspec.policy.pipeline_selector import PipelinePlan, PipelineSelector
from sglang_qspec.policy.precedence import Precedence
from sglang_qspec.policy.prefill_rows import PrefillRows
from sglang_qspec.policy.routing import Route
from sglang_qspec.policy.row_budget import RowBudget, spend
from sglang_qspec.policy.sidecar_load import SidecarLoad
from sglang_qspec.policy.sources import Sources
from sglang_qspec.policy.trial_level import DraftUse
from sglang_qspec.policy.waiting import DraftDeadline, WaitBudget, with_next_steps
from sglang_qspec.policy.width import LADDER, PASS_ROWS, Choice, WidthPolicy, most_width

__all__ = [
    "GPU_COST",
    "LADDER",
    "PASS_ROWS",
    "AnswerKind",
    "Choice",
    "Credit",
    "DraftDeadline",
    "DraftTrials",
    "DraftUse",
    "FirstTokens",
    "LastRequests",
    "PassCost",
    "PassTimes",
    "PipelinePlan",
    "PipelineSelector",
    "Precedence",
    "PrefillRows",
    "Route",
    "RowBudget",
    "SidecarLoad",
    "Sources",
    "WaitBudget",
    "WidthPolicy",
    "most_width",
    "passes_left",
    "spend",
    "with_next_steps",
]
