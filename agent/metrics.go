package agent

import (
	"context"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"ipoibcm/control"
)

var (
	counterDesc = prometheus.NewDesc("ipoibcm_events_total", "Counters of the agent's parts, drops by reason included.", []string{"interface", "part", "name"}, nil)
	peersDesc   = prometheus.NewDesc("ipoibcm_peers", "Peers known, by the mode that unicast to them uses.", []string{"interface", "mode"}, nil)
	upDesc      = prometheus.NewDesc("ipoibcm_up", "1 if interface and underlay are up.", []string{"interface"}, nil)
)

// A collector reads the agent at scrape time; nothing is added to the hot path.
type collector struct{ a *Agent }

func (c collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- counterDesc
	ch <- peersDesc
	ch <- upDesc
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	type reading struct {
		counters []control.Counter
		status   control.Status
	}
	r, err := ask(context.Background(), c.a, func() reading { return reading{c.a.allCounters(), c.a.viewStatus()} })
	if err != nil {
		ch <- prometheus.NewInvalidMetric(upDesc, err)
		return
	}
	name := c.a.opt.Name
	for _, n := range r.counters {
		ch <- prometheus.MustNewConstMetric(counterDesc, prometheus.CounterValue, float64(n.Value), name, n.Part, n.Name)
	}
	modes := map[string]float64{"RC": 0, "UC": 0, "UD": 0}
	for _, p := range r.status.Peers {
		modes[p.Mode]++
	}
	for _, m := range []string{"RC", "UC", "UD"} {
		ch <- prometheus.MustNewConstMetric(peersDesc, prometheus.GaugeValue, modes[m], name, m)
	}
	up := 0.0
	if r.status.Interface.State == "up" {
		up = 1
	}
	ch <- prometheus.MustNewConstMetric(upDesc, prometheus.GaugeValue, up, name)
}

// metrics serves the agent's counters and those of the Go runtime.
func (a *Agent) metrics() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collector{a}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
}
