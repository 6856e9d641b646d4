package control

// States of a member.
const (
	MemberSelf    = "self"    // this host
	MemberHeard   = "heard"   // it was heard within the last five minutes
	MemberQuiet   = "quiet"   // it was heard before that
	MemberSilent  = "silent"  // it was never heard; perhaps nothing was ever sent to it
	MemberRefused = "refused" // the setting allow does not have it
)

// MemberStates are all states of a member.
var MemberStates = []string{MemberSelf, MemberHeard, MemberQuiet, MemberSilent, MemberRefused}

// A Member is one host that gets a copy of every broadcast.
type Member struct {
	ID      string   `json:"id"`
	GIDs    []string `json:"gids"`
	IPs     []string `json:"ips"`              // that it publishes
	UDQPN   string   `json:"ud_qpn,omitempty"` // that it publishes
	By      string   `json:"by"`               // where it was found: the key, the line of the file, the name
	State   string   `json:"state"`
	Heard   bool     `json:"heard"`
	HeardMS int64    `json:"heard_ms"` // since its last word; 0 unless heard
}

// Members answers PathMembers.
type Members struct {
	Version int    `json:"version"`
	Link    string `json:"link,omitempty"`
	Source  string `json:"source"`
	ID      string `json:"id,omitempty"` // of this host at the source
	// Copies is true if broadcasts are copied to members. Else the underlay has multicast.
	Copies      bool     `json:"copies"`
	Known       bool     `json:"known"`                 // the source has answered, now or before the start
	Revision    uint64   `json:"revision"`              // of the source; 0 if it has none
	AgeMS       int64    `json:"age_ms"`                // since the list was last known to be right
	Saved       bool     `json:"saved"`                 // the list is of before the start
	FailingMS   int64    `json:"failing_ms"`            // how long the source has failed; 0 if it does not fail
	Error       string   `json:"error,omitempty"`       // of the source, or of what in the list cannot be used
	Published   bool     `json:"published"`             // others find us at the source
	Unpublished string   `json:"unpublished,omitempty"` // why they do not
	Held        []string `json:"held,omitempty"`        // not named any more, and kept for a moment: the source had failed
	Note        string   `json:"note,omitempty"`
	Failures    uint64   `json:"failures"`
	Refused     uint64   `json:"refused"` // records that could not be used
	Members     []Member `json:"members"`
}
