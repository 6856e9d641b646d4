// Package cm is the InfiniBand communication manager as a pure state machine.
//
// A [Manager] holds every connection of one port. Its Step turns an [Event] (a
// MAD came in, the user asked, a deadline passed) into [Action]s (send this
// MAD, tell the user). It reads no clock and starts nothing.
//
// # The active side
//
//	Connect -> SendMAD REQ … -> ReplyReceived    the user moves its QP to RTS
//	Ready   -> SendMAD RTU, Established
//
// # The passive side
//
//	RequestReceived                              the user moves a QP to RTS
//	Accept  -> SendMAD REP … -> Established      on RTU, or on DataOnQP
//
// The user may instead Reject, or Defer (an MRA asks the peer for patience). If
// it does nothing, the MRA goes out when half the peer's patience is used up.
//
// # Promises
//
// An active connection that was begun with Connect ends with exactly one
// [Failed] or one [Disconnected]; later, exactly one [Released] gives its QPN back.
// A passive one ends in the same way once RequestReceived has told of it, except
// that the user's own Reject of a REQ is its end and that Released comes only if
// a REP was sent. After the end the handle is dead: events for it
// are counted and change nothing.
//
// # Crossing REQs
//
// Which of two REQs that cross survives is not decided here, because it takes
// link-layer addresses (RFC 4755 section 3.3). Connections to one peer live
// side by side; [RequestReceived] carries what the decision needs, and [Cancel]
// stops an outstanding REQ at once without a word.
//
// Sources: IBA volume 1, chapter 12, as Linux's core/cm.c and ibta_vol1_c12.h have it.
// Private data is carried unread; RFC 4755 section 6 defines it. Missing:
// alternate paths (a LAP is rejected), SIDR (answered "unsupported"), RD and XRC.
package cm
