package ipoib

import (
	"fmt"
	"time"

	"ipoibcm/neigh"
	"ipoibcm/wire/encap"
)

// tellsPerSecond bounds the notes about what was dropped; as many again may come
// at once. Each of them costs many times what the drop itself does, which a flood
// would use, and nobody reads faster.
const tellsPerSecond = 64

// tells is the budget of such notes.
type tells struct {
	used float64 // notes told and not yet paid for
	at   time.Time
}

// mayTell reports whether one more drop may be told of. It counts what is not.
func (f *Interface) mayTell() bool {
	t := &f.tells
	if d := f.now.Sub(t.at); d > 0 {
		t.used = max(0, t.used-d.Seconds()*tellsPerSecond)
		t.at = f.now
	}
	if t.used+1 > 2*tellsPerSecond {
		f.count(nUntold)
		return false
	}
	t.used++
	return true
}

// refusal says in words what neigh dropped.
func refusal(a neigh.Refused) string {
	why := ""
	switch a.Reason {
	case neigh.DropMalformed:
		return "dropped: address resolution that cannot be read"
	case neigh.DropSpoofed:
		why = "the packet has another source"
	case neigh.DropBadSender:
		why = "that is no address a host can have"
	case neigh.DropLocked:
		why = "it has only just said otherwise"
	case neigh.DropStillThere:
		why = "it still answers where it was"
	case neigh.DropChallenges:
		why = "too many others are asked whether they still answer"
	case neigh.DropNotOverride:
		why = "it does not ask to replace what is known"
	default:
		why = a.Reason.String()
	}
	if a.Claimed == (encap.LinkAddr{}) {
		return fmt.Sprintf("dropped: a claim about %v: %s", a.IP, why)
	}
	return fmt.Sprintf("dropped: %v is said to be at %v: %s", a.IP, a.Claimed, why)
}
