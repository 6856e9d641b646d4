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

// A portChange is an event of a port, if it has changed.
type portChange struct {
	kind    verbs.EventKind
	changed bool
	text    string
}

// portEvents returns the differences between two states of the port.
func portEvents(old, now *verbs.Port) (events []verbs.Event) {
	changes := roceChanges(old, now)
	if now.InfiniBand {
		changes = infiniBandChanges(old, now)
	}
	for _, c := range changes {
		if c.changed {
			events = append(events, verbs.Event{Kind: c.kind, Text: c.text})
		}
	}
	return events
}

// roceChanges are in softroce's order: whether the port is usable, then GIDs, then MTUs.
func roceChanges(old, now *verbs.Port) []portChange {
	why := " is down"
	if len(now.GIDs) == 0 {
		why = " has no RoCE v2 GID"
	}
	return []portChange{
		{verbs.PortActive, now.Active && !old.Active, "underlay " + now.UnderlayIf + " is usable"},
		{verbs.PortError, !now.Active && old.Active, "underlay " + now.UnderlayIf + why},
		{verbs.GIDChange, !slices.Equal(now.GIDs, old.GIDs), fmt.Sprint(now.GIDs)},
		{verbs.MTUChange, now.UnderMTU != old.UnderMTU || now.MTU != old.MTU,
			fmt.Sprintf("underlay MTU %d, path MTU %d", now.UnderMTU, now.MTU.Octets())},
	}
}

func infiniBandChanges(old, now *verbs.Port) []portChange {
	return []portChange{
		{verbs.PortActive, now.Active && !old.Active, "the port is active"},
		{verbs.PortError, !now.Active && old.Active, "the port is not active"},
		{verbs.LIDChange, now.LID != old.LID, fmt.Sprintf("LID %d", now.LID)},
		{verbs.SMChange, now.SMLID != old.SMLID || now.SMSL != old.SMSL || now.GRHRequired != old.GRHRequired,
			fmt.Sprintf("subnet manager at LID %d", now.SMLID)},
		{verbs.PKeyChange, !slices.Equal(now.PKeys, old.PKeys), fmt.Sprint(now.PKeys)},
		{verbs.GIDChange, !slices.Equal(now.GIDs, old.GIDs), fmt.Sprint(now.GIDs)},
		{verbs.MTUChange, now.MTU != old.MTU, fmt.Sprintf("path MTU %d", now.MTU.Octets())},
	}
}
