// Package sa is a port's client of subnet administration as a pure state
// machine: it joins and leaves multicast groups, asks for paths, and subscribes
// to notices.
//
// A [Client] turns events (the port changed, a MAD came in, the user asked, a
// deadline passed) into actions (send this MAD, tell the user). It reads no clock
// and starts nothing.
//
// # The administrator
//
// It is where the subnet manager is, or where that redirects to. While the port
// has no subnet manager ([StateDown]) nothing is sent. Then one question for the
// ClassPortInfo is repeated until something answers ([StateAsking]), and all other
// questions wait: an administrator that has just come back, or a subnet without
// one, hears one MAD of each port and not all of them. Once it has answered
// ([StateReady]) at most Options.MaxInFlight questions are on their way. One that
// is not answered after all its repeats brings StateAsking back.
//
// # Groups
//
//	Join  -> SendMAD Set … -> Joined
//	Leave -> SendMAD Delete … -> Left
//
// An administrator that starts anew has forgotten all members. Groups are joined
// again, and notices subscribed to again, when the user says [Reregister], when
// the subnet manager, the LID or the GID of the port changes, when the
// administrator answers after it did not, and every Options.Refresh.
// A membership that is being renewed is used meanwhile.
//
// The administrator does not count: one Delete ends the membership of the port,
// whoever else on that port has joined. [Leave] with Forget sends nothing.
//
// # Paths
//
//	Query -> SendMAD Get … -> PathFound, or PathFailed
//
// What was found is kept for Options.PathLife and what failed for
// Options.FailedLife; both are forgotten where groups are joined again, of which
// [Flushed] tells.
//
// # Promises
//
// A Join is answered with [Joined] or [JoinFailed], then once for each change; the
// Client goes on trying until it succeeds or the user leaves. Left comes
// exactly once for each Leave of a group that was joined, and is the last that is
// heard of it, unless the user joins again before. PathFound or PathFailed comes
// exactly once for each path in question, however often it was asked for
// meanwhile, at most Options.QueryTimeout after it was first. Tries, groups, paths and
// questions on their way have bounds, and counters say what these refused.
//
// An answer is believed if it has the transaction ID of a question that is out,
// comes from where that went, and is about what was asked.
//
// Sources: IBA volume 1, chapters 13.4 and 15.2; RFC 4391 sections 5 and 10. How
// Linux asks: drivers/infiniband/core/sa_query.c and multicast.c, and
// ulp/ipoib/ipoib_multicast.c. Missing: answers of several segments (RMPP), and
// redirects to a port that only a GID names; both are counted.
package sa
