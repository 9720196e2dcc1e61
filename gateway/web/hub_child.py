"""Child process that queries the hub. It reads one order as JSON from its standard input and writes one answer.

A separate process is used because importing the hub's library and parsing headers of weights block the interpreter for
a long time. The daemon never imports that library; the import would lengthen its start by half.
"""

import sys

import msgspec

from gateway.model_files.hub import HubFailed
from gateway.model_files.search import FoundRepository, inspect_one, recommend, search, search_shortlist
from gateway.web.schemas import HubAnswer, HubModel, HubModels, HubOrder


def main() -> None:
    """Answer one order."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=HubOrder)
    try:
        answer = HubAnswer(_query(order))
    except HubFailed as error:
        answer = HubAnswer(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def _query(order: HubOrder) -> HubModels:
    available = order.available_bytes
    match order.verb:
        case "search":
            try:
                models, is_offline = search(order.words, available), False
            except HubFailed:
                models, is_offline = search_shortlist(order.words, available), True
        case "recommend":
            recommendation = recommend(available)
            models, is_offline = recommendation.candidates, bool(recommendation.offline)
        case "info":
            models, is_offline = [inspect_one(order.repository, available)], False
    return HubModels([_model(model) for model in models], available, is_offline)


def _model(model: FoundRepository) -> HubModel:
    info = model.info
    if info is None:
        reason = model.reason.removeprefix("cannot be loaded: ")
        return HubModel(model.repository, model.downloads, model.is_downloaded, None, model.reason, (reason,))
    return HubModel(
        repository=model.repository,
        downloads=model.downloads,
        is_here=model.is_downloaded,
        fits=info.fits,
        verdict=info.verdict,
        obstacles=info.obstacles,
        disk_bytes=info.disk_bytes,
        weights_bytes=info.weights_bytes,
        context=info.context,
        model_type=info.model_type,
        purpose=model.purpose,
    )


if __name__ == "__main__":
    main()
