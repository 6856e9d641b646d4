package ipoib

import "ipoibcm/counters"

// A counter is one of the machine's own counters.
type counter uint8

// Counters. Those that begin with drop count what was dropped, refused, not told or too late.
const (
	nREQSent counter = iota
	nEstablishedActive
	nEstablishedPassive
	nRedials
	nDialFailed
	nAcceptFailed
	nQPErrors
	nQPFailed
	nDREQByUs
	nDREQByPeer
	nIdle
	nOrphaned
	nCrowded
	nRoomMade
	nFallbacks
	nMoved
	nCrossSeen
	nCrossAccepted
	nCrossRejected
	nCrossYielded
	nCrossExpired
	nBlackHoles
	nProbes
	nProbesHeard
	nProbesAnswered
	nREJReceived
	nREJSent
	nInbandSent
	nInbandReceived
	nInbandTurns
	nInbandEstablished
	nInbandGivenUp
	nInbandSpared
	nPackets
	nQueued
	nQueueSent
	nFragmented
	nTooBig
	nUnreachable
	nNDOnConn
	nRouterOut
	nRouterIn
	nUntold
	nCopies
	nCopiesWaited
	nPathsAsked
	nToRouters
	dropCopies
	dropPathQueue
	dropNoPath
	dropGroupQueue
	dropNoGroup
	dropQueueFull
	dropQueueTotal
	dropQueueGone
	dropDown
	dropIPv6Off
	dropMalformed
	dropFrame
	dropProbe
	dropARPOnConn
	dropOversize
	dropSilent
	dropUnreachSilent
	dropUnreachRate
	dropFromTUN
	dropReflected
	dropNotWanted
	dropGroupPaths
	dropPeers
	dropConns
	dropHostConns
	dropLegacyConns
	dropStaleHandle
	dropInbandOff
	dropInbandMalformed
	dropInbandSource
	dropInbandGroup
	dropGSIOff
	dropNotAllowed
	numCounters
)

var counterNames = [numCounters]string{
	nREQSent:            "req_sent",
	nEstablishedActive:  "established_active",
	nEstablishedPassive: "established_passive",
	nRedials:            "redials_accepted",
	nDialFailed:         "dial_failed",
	nAcceptFailed:       "accept_failed",
	nQPErrors:           "qp_errors",
	nQPFailed:           "qp_create_failed",
	nDREQByUs:           "closed_by_us",
	nDREQByPeer:         "closed_by_peer",
	nIdle:               "closed_idle",
	nOrphaned:           "closed_without_neighbour",
	nCrowded:            "modes_withdrawn",
	nRoomMade:           "conns_made_room",
	nFallbacks:          "service_id_fallbacks",
	nMoved:              "peer_qpn_changed",
	nCrossSeen:          "crossings_seen",
	nCrossAccepted:      "crossings_accepted",
	nCrossRejected:      "crossings_rejected",
	nCrossYielded:       "crossings_yielded",
	nCrossExpired:       "crossings_expired",
	nBlackHoles:         "path_mtu_lowered",
	nProbes:             "path_probes_sent",
	nProbesHeard:        "path_probes_acknowledged",
	nProbesAnswered:     "path_probes_answered",
	nREJReceived:        "rej_received",
	nREJSent:            "rej_sent",
	nInbandSent:         "inband_sent",
	nInbandReceived:     "inband_received",
	nInbandTurns:        "inband_turned_to",
	nInbandEstablished:  "inband_established",
	nInbandGivenUp:      "inband_given_up",
	nInbandSpared:       "inband_spared",
	nPackets:            "slow_path_packets",
	nQueued:             "queued_for_connection",
	nQueueSent:          "queue_sent_on_connection",
	nFragmented:         "fragmented",
	nTooBig:             "icmp_too_big",
	nUnreachable:        "icmp_unreachable",
	nNDOnConn:           "nd_on_connection",
	nRouterOut:          "router_messages_out",
	nRouterIn:           "router_messages_in",
	nUntold:             "drops_not_told",
	nCopies:             "copies",
	nCopiesWaited:       "copies_waited",
	nPathsAsked:         "paths_asked",
	nToRouters:          "sent_to_all_routers",
	dropCopies:          "drop_copies",
	dropPathQueue:       "drop_path_queue",
	dropNoPath:          "drop_no_path",
	dropGroupQueue:      "drop_group_queue",
	dropNoGroup:         "drop_no_group",
	dropQueueFull:       "drop_connection_queue",
	dropQueueTotal:      "drop_connection_queue_total",
	dropQueueGone:       "drop_connection_queue_given_up",
	dropDown:            "drop_interface_down",
	dropIPv6Off:         "drop_ipv6_off",
	dropMalformed:       "drop_malformed_packet",
	dropFrame:           "drop_malformed_frame",
	dropProbe:           "drop_path_probe",
	dropARPOnConn:       "drop_arp_on_connection",
	dropOversize:        "drop_oversize",
	dropSilent:          "drop_oversize_unanswerable",
	dropUnreachSilent:   "unreachable_unanswerable",
	dropUnreachRate:     "unreachable_not_told",
	dropFromTUN:         "drop_nd_from_tun",
	dropReflected:       "drop_reflected",
	dropNotWanted:       "drop_group_not_wanted",
	dropGroupPaths:      "group_paths_full",
	dropPeers:           "peers_full",
	dropConns:           "connections_full",
	dropHostConns:       "connections_of_host_full",
	dropLegacyConns:     "legacy_connections_full",
	dropStaleHandle:     "late_events",
	dropInbandOff:       "drop_inband_off",
	dropInbandMalformed: "drop_inband_malformed",
	dropInbandSource:    "drop_inband_source",
	dropInbandGroup:     "drop_inband_to_group",
	dropGSIOff:          "drop_gsi_off",
	dropNotAllowed:      "drop_not_allowed",
}

// count adds one to c.
func (f *Interface) count(c counter) { f.n[c]++ }

// Counters lists every counter in a fixed order: the machine's own, then those
// of its parts with the name of the part in front.
func (f *Interface) Counters() []Counter {
	var cs []Counter
	for i, n := range f.n {
		cs = append(cs, Counter{Name: counterNames[i], Value: n})
	}
	add := func(part string) func(string, uint64) {
		return func(name string, v uint64) { cs = append(cs, Counter{Name: part + name, Value: v}) }
	}
	f.cm.Counters(add("cm_"))
	f.group.Counters(add("group_"))
	table, neighbours := f.fib.Counters(), f.neigh.Counters()
	counters.Each(&table, add("fib_"))
	if f.fab != nil {
		f.fab.sa.Counters(add("sa_"))
	}
	counters.Each(&neighbours, add("neigh_"))
	return cs
}
