package cm

import "fmt"

// A State is the state of one connection, with the names of IBA 12.9.
type State uint8

// States.
const (
	StateIdle        State = iota
	StateREQSent           // active: REQ out
	StateMRAREQRcvd        // active: REQ out, the peer asked for patience
	StateREPRcvd           // active: waiting for the user's Ready
	StateMRAREPSent        // active: the same, and we asked for patience
	StateREQRcvd           // passive: waiting for the user's Accept
	StateMRAREQSent        // passive: the same, and we asked for patience
	StateREPSent           // passive: REP out
	StateMRAREPRcvd        // passive: REP out, the peer asked for patience
	StateEstablished       // up
	StateDREQSent          // DREQ out
	StateTimewait          // over; holds QPN and communication ID back
	StateRejected          // over; repeats of the rejected or cancelled message get the same REJ
	numStates
)

var stateNames = [numStates]string{"IDLE", "REQ_SENT", "MRA_REQ_RCVD", "REP_RCVD", "MRA_REP_SENT", "REQ_RCVD",
	"MRA_REQ_SENT", "REP_SENT", "MRA_REP_RCVD", "ESTABLISHED", "DREQ_SENT", "TIMEWAIT", "REJECTED"}

// String prints s as the specification names it.
func (s State) String() string {
	if s < numStates {
		return stateNames[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}
