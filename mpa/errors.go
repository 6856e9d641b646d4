package mpa

import "fmt"

// A Code is an MPA error code: the third part of a Terminate with layer 2 (LLP)
// and error type 0 (MPA).
type Code uint8

// MPA error codes: 1 to 4 are RFC 5044's, the others RFC 6581's (section 8).
const (
	CodeClosed       Code = 1 // TCP connection closed, terminated or lost
	CodeCRC          Code = 2 // received CRC does not match
	CodeMarker       Code = 3 // marker and ULPDU_Length disagree
	CodeFrame        Code = 4 // invalid request or reply frame
	CodeLocal        Code = 5 // local catastrophic
	CodeInsufficient Code = 6 // insufficient IRD resources
	CodeNoRTR        Code = 7 // no matching RTR option
)

// String names the code.
func (c Code) String() string {
	names := [...]string{1: "connection closed", "CRC mismatch", "marker mismatch", "invalid request or reply frame",
		"local catastrophic error", "insufficient IRD resources", "no matching RTR option"}
	if int(c) < len(names) && c > 0 {
		return names[c]
	}
	return fmt.Sprintf("code %d", uint8(c))
}

// An Outcome is what becomes of a connection because of a fault.
type Outcome uint8

// Outcomes.
const (
	Ignore    Outcome = iota // counted, nothing else
	CloseTCP                 // TCP is closed, no message is sent
	Terminate                // a Terminate is sent, then TCP is closed
	Refuse                   // a rejecting reply is sent; TCP stays open
)

// String names the outcome.
func (o Outcome) String() string {
	return [...]string{"ignore", "close", "terminate", "reject"}[min(o, Refuse)]
}

// A Reason is one kind of fault, of a peer or our own. Each is counted.
type Reason uint8

// Reasons. What becomes of each, and the clause that says so, is in the table
// below.
const (
	ReasonNone            Reason = iota
	ReasonClosed                 // TCP ended before the connection was settled
	ReasonTimeout                // the peer's startup frame was not complete in time
	ReasonKey                    // neither the key of a request nor of a reply
	ReasonBothInitiators         // a request where a reply was due
	ReasonBothResponders         // a reply where a request was due
	ReasonRev                    // a revision that we do not speak
	ReasonTooLong                // PD_Length above 512
	ReasonNoData                 // S set, but PD_Length below 4
	ReasonEnhanced               // enhanced request, and we are to speak revision 1 only
	ReasonUnenhancedReply        // enhanced request, accepting reply without enhanced data
	ReasonUnaskedEnhanced        // unenhanced request, enhanced reply
	ReasonEarlyData              // octets behind a request before it was answered
	ReasonIRD                    // responder ORD above the IRD that we can provide
	ReasonModel                  // flag A of the reply is not that of the request
	ReasonNoRTR                  // none of the reply's RTR types can be generated
	ReasonNotRTR                 // peer-to-peer, and the first message is no RTR that was negotiated
	ReasonTerminated             // peer-to-peer, and the first message is a Terminate
	ReasonRTRTimeout             // peer-to-peer, and no first message in time
	ReasonNeedORD                // the initiator's IRD is below the ORD that our ULP needs
	ReasonStrictIRD              // the initiator's ORD is above our IRD, and we are strict
	ReasonRejected               // rejected by our ULP
	ReasonPeerRejected           // rejected by the peer
	ReasonLocal                  // a fault of this end that has no code of its own
	ReasonCRC                    // FPDU: CRC
	ReasonMarker                 // FPDU: FPDUPTR does not point at its start
	ReasonULPDULength            // FPDU: longer than any may be
	ReasonReserved               // Res bits set
	ReasonRequestR               // R set in a request
	ReasonRev1S                  // S set in a frame of revision 1
	ReasonIdleFlags              // B, C or D set without A
	ReasonUnfenced               // octets right behind a reply: the responder waited for no first message
	NumReasons
)

type reasonInfo struct {
	name    string
	code    Code
	outcome Outcome
	clause  string
}

// reasons is what every fault leads to. ReasonNotRTR has code 7, because the message matches no RTR
// option. ReasonTimeout has code 4, because a peer that is only slow has sent no valid frame
// either.
var reasons = [NumReasons]reasonInfo{
	ReasonNone:            {"none", 0, Ignore, ""},
	ReasonClosed:          {"closed", CodeClosed, CloseTCP, "RFC 5044 section 8"},
	ReasonTimeout:         {"timeout", CodeFrame, CloseTCP, "RFC 5044 section 7.1.2"},
	ReasonKey:             {"key", CodeFrame, CloseTCP, "RFC 5044 section 7.1.1"},
	ReasonBothInitiators:  {"both_initiators", CodeFrame, CloseTCP, "RFC 5044 section 7.1.2"},
	ReasonBothResponders:  {"both_responders", CodeFrame, CloseTCP, "RFC 5044 section 7.1.2"},
	ReasonRev:             {"revision", CodeFrame, CloseTCP, "RFC 5044 section 7.1.1, RFC 6581 section 6"},
	ReasonTooLong:         {"pd_length", CodeFrame, CloseTCP, "RFC 5044 section 7.1.1"},
	ReasonNoData:          {"no_enhanced_data", CodeFrame, CloseTCP, "RFC 6581 section 6"},
	ReasonEnhanced:        {"enhanced_request", CodeFrame, CloseTCP, "RFC 6581 section 10"},
	ReasonUnenhancedReply: {"unenhanced_reply", CodeFrame, CloseTCP, "RFC 6581 section 10"},
	ReasonUnaskedEnhanced: {"unasked_enhanced_reply", CodeFrame, CloseTCP, "RFC 6581 section 10"},
	ReasonEarlyData:       {"early_data", CodeFrame, CloseTCP, "RFC 5044 section 7.1.2"},
	ReasonIRD:             {"insufficient_ird", CodeInsufficient, Terminate, "RFC 6581 section 9.1"},
	ReasonModel:           {"model", CodeNoRTR, Terminate, "RFC 6581 section 9.2"},
	ReasonNoRTR:           {"no_rtr", CodeNoRTR, Terminate, "RFC 6581 section 9.2"},
	ReasonNotRTR:          {"not_rtr", CodeNoRTR, Terminate, "RFC 6581 section 5"},
	ReasonTerminated:      {"terminated", 0, CloseTCP, "RFC 6581 section 8"},
	ReasonRTRTimeout:      {"rtr_timeout", CodeLocal, CloseTCP, "RFC 6581 section 9.3"},
	ReasonNeedORD:         {"need_ord", CodeInsufficient, Refuse, "RFC 6581 section 9.1"},
	ReasonStrictIRD:       {"strict_ird", CodeInsufficient, Refuse, "RFC 6581 section 9.1"},
	ReasonRejected:        {"rejected", 0, Refuse, "RFC 5044 section 7.1.2"},
	ReasonPeerRejected:    {"peer_rejected", 0, Ignore, "RFC 5044 section 7.1.2"},
	ReasonLocal:           {"local", CodeLocal, Terminate, "RFC 6581 section 9.3"},
	ReasonCRC:             {"crc", CodeCRC, Terminate, "RFC 5044 section 8"},
	ReasonMarker:          {"marker", CodeMarker, Terminate, "RFC 5044 section 8"},
	ReasonULPDULength:     {"ulpdu_length", CodeLocal, Terminate, "RFC 5044 section 4.1"},
	ReasonReserved:        {"reserved_bits", 0, Ignore, "RFC 6581 section 6"},
	ReasonRequestR:        {"request_r", 0, Ignore, "RFC 5044 section 7.1.1"},
	ReasonRev1S:           {"revision1_s", 0, Ignore, "RFC 6581 section 6"},
	ReasonIdleFlags:       {"idle_flags", 0, Ignore, "RFC 6581 section 9.2"},
	ReasonUnfenced:        {"unfenced", 0, Ignore, "RFC 5044 section 7.1.2"},
}

// String is the name of r in counters.
func (r Reason) String() string {
	if r < NumReasons {
		return reasons[r].name
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// Code returns the error code for the user, and for the Terminate if one is sent. Zero means that
// there is none.
func (r Reason) Code() Code { return reasons[r].code }

// Outcome returns what r leads to. An end that may send no FPDU yet closes TCP instead of
// [Terminate]: an initiator before an accepting reply, and a responder before the first FPDU (RFC
// 5044 section 7.1.2). Between request and reply a responder answers ReasonLocal with [Refuse].
func (r Reason) Outcome() Outcome { return reasons[r].outcome }

// FPDU reports whether r is a fault of FPDUs, which a [Deframer] finds.
func (r Reason) FPDU() bool { return r == ReasonCRC || r == ReasonMarker || r == ReasonULPDULength }

// Clause returns the clause that defines what r leads to.
func (r Reason) Clause() string { return reasons[r].clause }

// An Error is the reason why a connection failed.
type Error struct {
	Reason Reason
	Detail string // for people; may be empty
	Cause  Cause  // ReasonTerminated: the cause in the peer's Terminate
}

func (e *Error) Error() string {
	s := "mpa: " + e.Reason.String()
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if c := e.Code(); c != 0 {
		s += fmt.Sprintf(" (2/0/%d %v, %s)", uint8(c), c, e.Reason.Clause())
	}
	return s
}

// Code returns the code of the reason, or the one in the peer's Terminate.
func (e *Error) Code() Code {
	if e.Reason == ReasonTerminated && e.Cause&0xff00 == llp {
		return Code(e.Cause.Code())
	}
	return e.Reason.Code()
}

func fault(r Reason, format string, args ...any) *Error {
	return &Error{Reason: r, Detail: fmt.Sprintf(format, args...)}
}

// Counters counts what was refused or ignored, by [Reason].
type Counters [NumReasons]uint64

// Add adds d.
func (c *Counters) Add(d *Counters) {
	for i := range c {
		c[i] += d[i]
	}
}

// Each calls f for every counter, in a fixed order.
func (c *Counters) Each(f func(name string, value uint64)) {
	for r := ReasonNone + 1; r < NumReasons; r++ {
		f(r.String(), c[r])
	}
}
