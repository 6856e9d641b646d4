package ipoib

import (
	"cmp"
	"fmt"

	"ipoibcm/neigh"
	"ipoibcm/wire/encap"
)

// tellsPerSecond bounds the notes about drops; twice as many may come at once. A note costs many
// times as much as the drop itself, so a flood could exhaust us with notes. Nobody reads more of
// them anyway.
const tellsPerSecond = 64

// mayTell reports whether a note about one more drop may be written. It counts the refused notes.
func (f *Interface) mayTell() bool {
	may := f.tells.Take(f.now, tellsPerSecond, 2*tellsPerSecond)
	if !may {
		f.count(nUntold)
	}
	return may
}

// refusals has texts for those reasons of neigh whose names are not clear enough.
var refusals = map[neigh.Drop]string{
	neigh.DropSpoofed:     "the packet has another source",
	neigh.DropBadSender:   "that is no address a host can have",
	neigh.DropLocked:      "it has only just said otherwise",
	neigh.DropStillThere:  "it still answers where it was",
	neigh.DropChallenges:  "too many others are asked whether they still answer",
	neigh.DropNotOverride: "it does not ask to replace what is known",
}

// refusal describes what neigh dropped, and why.
func refusal(a neigh.Refused) string {
	if a.Reason == neigh.DropMalformed {
		return "dropped: address resolution that cannot be read"
	}
	why := cmp.Or(refusals[a.Reason], a.Reason.String())
	if a.Claimed == (encap.LinkAddr{}) {
		return fmt.Sprintf("dropped: a claim about %v: %s", a.IP, why)
	}
	return fmt.Sprintf("dropped: %v is said to be at %v: %s", a.IP, a.Claimed, why)
}
