// Package sa is a port's client of subnet administration as a pure state machine: it joins and
// leaves multicast groups, asks for paths, and subscribes to notices.
//
// A [Client] turns events (the port changed, a MAD came in, the user asked, a deadline passed) into
// actions (send this MAD, tell the user). It reads no clock and starts nothing.
//
// # The administrator
//
// The administrator is at the subnet manager's address, or where a redirection from there leads.
// While the port has no subnet manager ([StateDown]) the Client sends nothing. Once it has one, the
// Client repeats one question, for the ClassPortInfo, until it is answered ([StateAsking]), and all
// other questions wait. So an administrator that has just come back receives one MAD of each port,
// not all its questions. Once it has answered ([StateReady]) at most Options.MaxInFlight questions
// are unanswered at a time. A question that is not answered after all its repeats brings
// StateAsking back, unless the administrator has answered another one meanwhile.
//
// # Groups
//
//	Join  -> SendMAD Set … -> Joined
//	Leave -> SendMAD Delete … -> Left
//
// An administrator that starts anew has forgotten all members. The Client joins groups and
// subscribes to notices again when the user says [Reregister], when the subnet manager, the LID or
// the GID of the port changes, when the administrator answers after it did not, and every
// Options.Refresh. A membership that is being renewed is used meanwhile.
//
// The administrator does not count members on a port: one Delete ends the membership of the port,
// even if others on that port have joined too. [Leave] with Forget sends nothing.
//
// # Paths
//
//	Query -> SendMAD Get … -> PathFound, or PathFailed
//
// The Client keeps a path that was found for Options.PathLife, a refusal for Options.FailedLife. It
// forgets both earlier on [Reregister], when the subnet manager or the port changes, and when the
// administrator answers again after it missed the first try; if paths had been found it then
// returns [Flushed]. It also forgets the paths to a port when a notice says that the port has
// entered or left the subnet.
//
// # Promises
//
// A Join is answered with [Joined] or [JoinFailed], and then once for each change; the Client goes
// on trying until it succeeds or the user leaves, unless the cause is NoRoom or BadArgument. It
// returns Left exactly once for each Leave of a group that was joined, as the last action about the
// group, unless the user joins it again before. It returns PathFound or PathFailed exactly once for
// each path in question, however many Queries there are meanwhile, at most Options.QueryTimeout
// after the first of them. Tries, groups, paths and unanswered questions have bounds, and counters
// show what these refused.
//
// The Client accepts an answer if it has the transaction ID of an unanswered question, is from the
// LID to which the question was sent, and matches the question.
//
// Sources: IBA volume 1, chapters 13.4 and 15.2; RFC 4391 sections 5 and 10. How Linux asks:
// drivers/infiniband/core/sa_query.c and multicast.c, and ulp/ipoib/ipoib_multicast.c. Missing:
// answers of several segments (RMPP), and redirects to a port that only a GID names; both are
// counted.
package sa
