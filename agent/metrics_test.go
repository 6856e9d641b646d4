package agent

import "testing"

func TestMetricNames(t *testing.T) {
	for _, tt := range []struct{ part, name, want string }{
		{"datapath", "tx_packets", "datapath_tx_packets_total"},
		{"datapath", "rx_octets", "datapath_rx_bytes_total"},
		{"tun", "packets_merged", "tun_merged_packets_total"},
		{"ipoib", "closed_by_us", "ipoib_closed_by_this_host_total"},
	} {
		if got := metricName(tt.part, tt.name); got != tt.want {
			t.Errorf("%s of %s: got %q, want %q", tt.name, tt.part, got, tt.want)
		}
	}
	for _, name := range []string{"queue_pairs", "shared_receive_queues", "completion_queues", "address_handles", "memory_regions"} {
		if got := gauges[name]; got != name {
			t.Errorf("%s: gauge %q; it can fall, so it is no counter", name, got)
		}
	}
	for _, tt := range []struct{ name, want string }{
		{"drop_malformed_packet", "malformed_packet"}, {"rx_drop_icrc", "rx_icrc"}, {"up_drop_full", "up_full"}, {"mads_dropped", ""}, {"events_lost", ""},
	} {
		if got, _ := dropReason(tt.name); got != tt.want {
			t.Errorf("%s: reason %q, want %q", tt.name, got, tt.want)
		}
	}
}
