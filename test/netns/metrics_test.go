package netns

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
)

// scrape reads the metrics at a TCP address, as a host reaches it.
func (h *host) scrape(addr string) (text string, err error) {
	err = h.Do(func() error { // the connection is made here, in the host's namespace
		c, err := net.DialTimeout("tcp", addr, 2*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := fmt.Fprintf(c, "GET %s HTTP/1.0\r\n\r\n", control.PathMetrics); err != nil {
			return err
		}
		b, err := io.ReadAll(c)
		text = string(b)
		return err
	})
	return text, err
}

// memberMetrics are those of hosts with a source of members.
const memberMetrics = "ipoibcm_members_"

// alertsKnow fails where an alert speaks of a metric that is not in text: one of members, or
// one of the others.
func (s *segment) alertsKnow(text string, members bool) {
	s.T.Helper()
	rules, err := os.ReadFile("../../packaging/prometheus/ipoibcm.rules.yml")
	s.must(err)
	for _, name := range regexp.MustCompile(`ipoibcm_[a-z_]+`).FindAllString(string(rules), -1) {
		if strings.HasPrefix(name, memberMetrics) == members && !strings.Contains(text, "\n"+name+"{") {
			s.T.Errorf("an alert is about %s, which is no metric", name)
		}
	}
}

// metrics returns what the agent's socket has for Prometheus.
func (h *host) metrics() string {
	h.seg.Helper()
	body, err := h.agent.Stream(h.seg.ctx, control.PathMetrics)
	h.seg.must(err)
	defer body.Close()
	text, err := io.ReadAll(body)
	h.seg.must(err)
	return string(text)
}

// The metrics follow Prometheus's conventions, as its own tool judges, and the alerts
// speak of metrics that there are.
func TestMetrics(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	a.run(a.config("metrics: \":9755\"\nmetric_peers: 5\n")...)
	b.run()
	a.connect(b, "RC")
	time.Sleep(1100 * time.Millisecond) // until the data path's counts are known
	out, errs, code := a.output("show", "stats", "--control", a.path(".sock"))
	if code != 0 {
		t.Fatalf("show stats: %s%s", out, errs)
	}
	text := a.metrics()
	for _, want := range []string{"ipoibcm_up{", "ipoibcm_build_info{", "ipoibcm_answered{",
		`ipoibcm_peers{interface="` + ifName + `",mode="RC"} 1`,
		"ipoibcm_connections{interface=\"" + ifName + "\"} 1", "ipoibcm_datapath_tx_bytes_total{",
		"ipoibcm_peer_transmit_bytes_total{",
		`ipoibcm_drops_total{interface="` + ifName + `",part="ipoib",reason="malformed_packet"}`,
		`ipoibcm_drops_total{interface="` + ifName + `",part="datapath",reason="rx_flood"}`,
		`ipoibcm_drops_total{interface="` + ifName + `",part="softroce",reason="rx_icrc"}`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s", want)
		}
	}
	if regexp.MustCompile(`(?m)^ipoibcm_\w*octets`).MatchString(text) {
		t.Error("a metric counts octets: Prometheus has bytes")
	}
	s.alertsKnow(text, false)
	over, err := a.scrape("127.0.0.1:9755")
	s.must(err)
	if !strings.Contains(over, "ipoibcm_up{") {
		t.Errorf("over TCP: %s", over)
	}
	if _, err := b.scrape(a.v4.String() + ":9755"); err == nil {
		t.Error("another host reads the metrics of the loopback device")
	}
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Log("promtool is not installed: its opinion of the metrics was not asked")
		return
	}
	check := exec.Command(promtool, "check", "metrics")
	check.Stdin = strings.NewReader(text)
	if out, err := check.CombinedOutput(); err != nil || strings.Contains(string(out), "ipoibcm_") {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
}
