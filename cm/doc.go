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
// On either side the user may instead Reject, or Defer (an MRA asks the peer for patience). If
// it does nothing, the Manager sends the MRA when half of the peer's response timeout is over.
//
// # Promises
//
// An active connection that was begun with Connect ends with exactly one
// [Failed] or one [Disconnected]; later, exactly one [Released] gives its QPN back.
// After RequestReceived a passive connection ends in the same way, with two exceptions: if the
// user itself answers the REQ with Reject no Failed follows, and Released comes only if
// a REP was sent. After the end the handle is dead: events for it
// are counted and change nothing.
//
// # Crossing REQs
//
// The user decides which of two REQs that cross survives, because the decision takes
// link-layer addresses (RFC 4755 section 3.3). A Manager allows several connections to one
// peer. [RequestReceived] carries what the decision needs, and [Cancel] abandons an outstanding
// REQ at once and sends nothing.
//
// Sources: IBA volume 1, chapter 12, as Linux's core/cm.c and ibta_vol1_c12.h have it.
// The Manager does not read private data; RFC 4755 section 6 defines it. Missing:
// alternate paths (a LAP is rejected), SIDR (answered "unsupported"), RD and XRC.
package cm
