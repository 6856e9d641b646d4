package ipoib

// A Report is a kind of event that an operator acts on, or wants to find in the log. Note.Text
// says more.
type Report uint8

// Reports, the urgent ones last.
const (
	NoReport Report = iota
	ConnectionUp
	ConnectionClosed
	ConnectionLost
	ConnectionRefused // by us, with a REJ
	ConnectionFailed  // an attempt of ours
	PeerMoved         // an address has another link-layer address
	MTUChanged        // of the device, of UD, or of the path to a peer
	InterfaceUp
	SubnetReady // the subnet administrator of an InfiniBand port answers
	LimitLeft
	InterfaceDown
	DuplicateAddress
	NoSubnetManager // the InfiniBand port has no subnet manager
	LimitReached
)

var reportNames = [...]string{
	ConnectionUp: "connection up", ConnectionClosed: "connection closed", ConnectionLost: "connection lost", ConnectionRefused: "connection refused",
	ConnectionFailed: "connection failed", PeerMoved: "peer moved", MTUChanged: "MTU changed", InterfaceUp: "interface carries packets",
	LimitLeft: "below a limit again", InterfaceDown: "interface carries nothing", DuplicateAddress: "duplicate address", LimitReached: "limit reached",
	SubnetReady: "subnet administrator answers", NoSubnetManager: "no subnet manager",
}

// String prints the constant log message for r; "" for NoReport.
func (r Report) String() string {
	if int(r) >= len(reportNames) {
		return ""
	}
	return reportNames[r]
}

// Urgent reports whether somebody may have to act at once.
func (r Report) Urgent() bool { return r >= InterfaceDown }

// atLimit writes a note that a limit was reached, unless mayTell forbids one more note.
func (f *Interface) atLimit(text string) {
	if f.mayTell() {
		f.note(Note{Kind: NoteLink, Text: text, Report: LimitReached})
	}
}
