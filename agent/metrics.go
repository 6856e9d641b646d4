package agent

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"ipoibcm/control"
	"ipoibcm/ib"
)

// MaxMetricPeers is the most peers that have series of their own.
const MaxMetricPeers = 1000

// maxScrapes bounds the requests for metrics that are served at a time.
const maxScrapes = 4

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("ipoibcm_"+name, help, append([]string{"interface"}, labels...), nil)
}

// The metrics that are not counters of a part.
var (
	buildDesc       = desc("build_info", "What the program was built from, as a label.", "build")
	startDesc       = desc("start_time_seconds", "When the agent started, in seconds since 1970.")
	upDesc          = desc("up", "1 if packets can pass: interface and underlay are up.")
	warningsDesc    = desc("warnings", "What status tells an operator to look at.")
	answeredDesc    = desc("answered", "0 if nobody on the link has answered since a question failed.")
	peersDesc       = desc("peers", "Peers known, by the mode that unicast to them uses.", "mode")
	connectionsDesc = desc("connections", "Connections that are established.")
	duplicatesDesc  = desc("duplicate_addresses", "Addresses of the interface that another host uses.")
	membersDesc     = desc("members", "Hosts on the list of members, by whether they were heard of late.", "state")
	memberAgeDesc   = desc("members_age_seconds",
		"How long ago the list of members was last known to be right; absent before it ever was.")
	memberFailDesc = desc("members_source_failing", "1 while the source of the list of members fails.")
	publishedDesc  = desc("members_published", "1 if other hosts find this one at the source of the list of members.")
	dropsDesc      = desc("drops_total", "Packets, frames and messages dropped, by part and reason.", "part", "reason")
	peerDescs      = [...]*prometheus.Desc{
		desc("peer_transmit_packets_total", "Packets sent to a peer.", "gid", "qpn"),
		desc("peer_transmit_bytes_total", "Octets of IP sent to a peer.", "gid", "qpn"),
		desc("peer_receive_packets_total", "Packets of a peer that came over a connection.", "gid", "qpn"),
		desc("peer_receive_bytes_total", "Octets of IP of a peer that came over a connection.", "gid", "qpn"),
	}
	peersLeftOutDesc = desc("peers_without_series",
		"Peers that have no series of their own, because there are more than metric_peers.")
)

// A collector reads the agent at scrape time; nothing is added to the hot path.
type collector struct{ a *Agent }

// Describe sends nothing: which counters there are depends on the provider.
func (c collector) Describe(chan<- *prometheus.Desc) {}

// gauges holds the counters that can also fall, each with its metric name without the part.
var gauges = map[string]string{
	"tx_last_errno":      "last_send_errno",
	"socket_recv_buffer": "socket_receive_buffer_bytes", "socket_recv_buffer_asked": "socket_receive_buffer_asked_bytes",
	"socket_send_buffer": "socket_send_buffer_bytes", "socket_send_buffer_asked": "socket_send_buffer_asked_bytes",
	"queue_pairs": "queue_pairs", "shared_receive_queues": "shared_receive_queues", "completion_queues": "completion_queues",
	"address_handles": "address_handles", "memory_regions": "memory_regions",
}

// dropReason returns the reason of a drop, if name is that of a counter of drops.
func dropReason(name string) (string, bool) {
	before, after, ok := strings.Cut(name, "drop_")
	if !ok || before != "" && !strings.HasSuffix(before, "_") || after == "" {
		return "", false
	}
	return before + after, true
}

// metricName returns the metric name of a part's counter, without the prefix "ipoibcm_": units are those of
// Prometheus, and the name ends in _total.
func metricName(part, name string) string {
	// Nothing may look like an abbreviated unit: us is a microsecond.
	name = strings.ReplaceAll(strings.ReplaceAll(name, "octets", "bytes"), "_by_us", "_by_this_host")
	for _, unit := range []string{"_bytes", "_packets"} { // the unit comes last
		if before, after, ok := strings.Cut(name, strings.TrimPrefix(unit, "_")+"_"); ok && before == "" {
			name = after + unit
		}
	}
	return part + "_" + name + "_total"
}

// send sends one value; the first label is the interface.
func (c collector) send(ch chan<- prometheus.Metric, d *prometheus.Desc, t prometheus.ValueType, v float64,
	labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, t, v, append([]string{c.a.opt.Name}, labels...)...)
}

// gauge sends one value that can also fall.
func (c collector) gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	c.send(ch, d, prometheus.GaugeValue, v, labels...)
}

// counter sends one counter of a part.
func (c collector) counter(ch chan<- prometheus.Metric, n control.Counter) {
	if gauge, ok := gauges[n.Name]; ok {
		c.gauge(ch, desc(n.Part+"_"+gauge, "As it is now, of "+n.Part+"."), float64(n.Value))
	} else if why, ok := dropReason(n.Name); ok {
		c.send(ch, dropsDesc, prometheus.CounterValue, float64(n.Value), n.Part, why)
	} else {
		d := desc(metricName(n.Part, n.Name), fmt.Sprintf("Counter %s of %s.", n.Name, n.Part))
		c.send(ch, d, prometheus.CounterValue, float64(n.Value))
	}
}

// A reading is all that one scrape shows.
type reading struct {
	counters []control.Counter
	status   control.Status
	silent   bool
	conns    int
	members  control.Members
}

// read gathers what one scrape shows.
func (c collector) read(ctx context.Context) (r reading, err error) {
	a := c.a
	provider := a.providerStats()
	r, err = ask(ctx, a, func() reading {
		s := a.m.Status()
		return reading{counters: a.allCounters(provider), silent: s.Silence.Asked.IsValid(), conns: s.Conns}
	})
	if err == nil {
		r.status, err = a.viewStatus(ctx)
	}
	if err == nil {
		r.members, err = a.viewMembers(ctx)
	}
	return r, err
}

// Collect sends everything.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	a := c.a
	r, err := c.read(context.Background())
	if err != nil {
		ch <- prometheus.NewInvalidMetric(upDesc, err)
		return
	}
	for _, n := range r.counters {
		c.counter(ch, n)
	}
	c.gauge(ch, buildDesc, 1, a.opt.Build)
	c.gauge(ch, startDesc, float64(a.start.UnixMilli())/1000)
	c.gauge(ch, upDesc, truth(r.status.Interface.State == "up"))
	c.gauge(ch, warningsDesc, float64(len(r.status.Warnings)))
	c.gauge(ch, answeredDesc, truth(!r.silent))
	c.gauge(ch, connectionsDesc, float64(r.conns))
	states := map[string]float64{}
	for _, ad := range r.status.Interface.Addresses {
		states[ad.State]++
	}
	c.gauge(ch, duplicatesDesc, states["duplicate"])
	modes := map[string]float64{}
	for _, p := range r.status.Peers {
		modes[p.Mode]++
	}
	for _, t := range []ib.Transport{ib.RC, ib.UC, ib.UD} {
		c.gauge(ch, peersDesc, modes[t.String()], t.String())
	}
	c.peers(ch, r.status.Peers)
	c.members(ch, &r.members)
}

// peers sends the series of single peers, of the busiest ones if there are too many.
func (c collector) peers(ch chan<- prometheus.Metric, peers []control.Peer) {
	most := min(c.a.opt.MetricPeers, MaxMetricPeers)
	if most <= 0 {
		return
	}
	if len(peers) > most {
		slices.SortStableFunc(peers, func(x, y control.Peer) int {
			return int(min(1, max(-1, int64(y.TxOctets+y.RxOctets)-int64(x.TxOctets+x.RxOctets))))
		})
	}
	c.gauge(ch, peersLeftOutDesc, float64(max(0, len(peers)-most)))
	for _, p := range peers[:min(most, len(peers))] {
		for i, v := range []uint64{p.TxPackets, p.TxOctets, p.RxPackets, p.RxOctets} {
			c.send(ch, peerDescs[i], prometheus.CounterValue, float64(v), p.GID, p.UDQPN)
		}
	}
}

// truth is 1 or 0.
func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// metrics serves the agent's counters and those of the Go runtime.
func (a *Agent) metrics() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collector{a}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes})
}

// listenMetrics opens the TCP address that metrics are served on. Without a host the address is 127.0.0.1.
func listenMetrics(addr string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return l, nil
}

// serveMetrics answers scrapes on l, and nothing else, until ctx ends.
func (a *Agent) serveMetrics(ctx context.Context, srv *http.Server, l net.Listener) error {
	if srv.TLSConfig != nil {
		l = tls.NewListener(l, srv.TLSConfig)
	}
	return a.serveUntil(ctx, srv, l)
}

// members sends what is known of the list of members, where there is one.
func (c collector) members(ch chan<- prometheus.Metric, d *control.Members) {
	if !d.Copies {
		return
	}
	n := map[string]float64{}
	for _, m := range d.Members {
		n[m.State]++
	}
	for _, state := range control.MemberStates {
		c.gauge(ch, membersDesc, n[state], state)
	}
	if c.a.opt.Members == nil {
		return // the configuration is always right
	}
	if d.Known {
		c.gauge(ch, memberAgeDesc, float64(d.AgeMS)/1000)
	}
	c.gauge(ch, memberFailDesc, truth(d.Error != "" && d.FailingMS > 0 || !d.Known))
	if c.a.members.o.ID != "" {
		c.gauge(ch, publishedDesc, truth(d.Published))
	}
}
