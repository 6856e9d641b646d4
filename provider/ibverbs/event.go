package ibverbs

import (
	"fmt"
	"slices"

	"ipoibcm/verbs"
)

// Asynchronous events (enum ibv_event_type).
const (
	evCQError     = 0
	evQPFatal     = 1
	evQPRequest   = 2
	evQPAccess    = 3
	evCommEst     = 4
	evSQDrained   = 5
	evDeviceFatal = 8
	evPortActive  = 9
	evPortError   = 10
	evLIDChange   = 11
	evPKeyChange  = 12
	evSMChange    = 13
	evLastWQE     = 16
	evReregister  = 17
	evGIDChange   = 18
)

// An asyncAction is what we do about an asynchronous event.
type asyncAction uint8

const (
	asyncNothing  asyncAction = iota
	asyncQPDied               // the QP went to ERR; asyncStatus says why
	asyncCQDied               // every QP of the CQ goes to ERR
	asyncComm                 // first packet on a QP in RTR
	asyncPort                 // read the port's state again
	asyncRegister             // the same, and tell the user that it must repeat all joins
	asyncFatal                // the device is gone
)

// asyncOf returns what to do about an event.
func asyncOf(event int) asyncAction {
	switch event {
	case evQPFatal, evQPRequest, evQPAccess:
		return asyncQPDied
	case evCQError:
		return asyncCQDied
	case evCommEst:
		return asyncComm
	case evPortActive, evPortError, evLIDChange, evPKeyChange, evSMChange, evGIDChange:
		return asyncPort
	case evReregister:
		return asyncRegister
	case evDeviceFatal:
		return asyncFatal
	}
	return asyncNothing // SQ drained, last WQE reached, SRQ limits, path migration
}

// asyncStatus returns the status that says why a QP died.
func asyncStatus(event int) verbs.Status {
	switch event {
	case evQPRequest:
		return verbs.LocalQPOpError
	case evQPAccess:
		return verbs.LocalProtError
	}
	return verbs.GeneralError
}

// portEvents returns the differences between two states of the port, in softroce's order: whether
// it is usable, then GIDs, then MTUs.
func portEvents(old, now *verbs.Port) (events []verbs.Event) {
	if now.InfiniBand {
		return infiniBandEvents(old, now)
	}
	if now.Active != old.Active {
		ev := verbs.Event{Kind: verbs.PortActive, Text: "underlay " + now.UnderlayIf + " is usable"}
		if !now.Active {
			ev = verbs.Event{Kind: verbs.PortError, Text: "underlay " + now.UnderlayIf + " is down"}
			if len(now.GIDs) == 0 {
				ev.Text = "underlay " + now.UnderlayIf + " has no RoCE v2 GID"
			}
		}
		events = append(events, ev)
	}
	if fmt.Sprint(now.GIDs) != fmt.Sprint(old.GIDs) {
		events = append(events, verbs.Event{Kind: verbs.GIDChange, Text: fmt.Sprint(now.GIDs)})
	}
	if now.UnderMTU != old.UnderMTU || now.MTU != old.MTU {
		events = append(events, verbs.Event{Kind: verbs.MTUChange,
			Text: fmt.Sprintf("underlay MTU %d, path MTU %d", now.UnderMTU, now.MTU.Octets())})
	}
	return events
}

// infiniBandEvents is portEvents for an InfiniBand port.
func infiniBandEvents(old, now *verbs.Port) (events []verbs.Event) {
	for _, e := range []struct {
		kind    verbs.EventKind
		changed bool
		text    string
	}{
		{verbs.PortActive, now.Active && !old.Active, "the port is active"},
		{verbs.PortError, !now.Active && old.Active, "the port is not active"},
		{verbs.LIDChange, now.LID != old.LID, fmt.Sprintf("LID %d", now.LID)},
		{verbs.SMChange, now.SMLID != old.SMLID || now.SMSL != old.SMSL || now.GRHRequired != old.GRHRequired,
			fmt.Sprintf("subnet manager at LID %d", now.SMLID)},
		{verbs.PKeyChange, !slices.Equal(now.PKeys, old.PKeys), fmt.Sprint(now.PKeys)},
		{verbs.GIDChange, !slices.Equal(now.GIDs, old.GIDs), fmt.Sprint(now.GIDs)},
		{verbs.MTUChange, now.MTU != old.MTU, fmt.Sprintf("path MTU %d", now.MTU.Octets())},
	} {
		if e.changed {
			events = append(events, verbs.Event{Kind: e.kind, Text: e.text})
		}
	}
	return events
}
