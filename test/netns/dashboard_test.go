package netns

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

var dashboardTo = flag.String("dashboard", "",
	"the file to which TestDashboardQueries writes what all panels show, over a minute of traffic")

const dashboardFile = "../../packaging/grafana/ipoibcm.json"

// dropsPanel is the title of the panel whose query leaves out what is 0.
const dropsPanel = "Drops by reason"

// A dashboard is what of Grafana's JSON model the test looks at.
type dashboard struct {
	UID           string `json:"uid"`
	Title         string `json:"title"`
	SchemaVersion int    `json:"schemaVersion"`
	Panels        []struct {
		ID          int    `json:"id"`
		Title       string `json:"title"`
		Type        string `json:"type"`
		Description string `json:"description"`
		GridPos     struct{ X, Y, W, H int }
		Datasource  struct{ Type, UID string }
		FieldConfig struct {
			Defaults struct{ Unit string }
		}
		Targets []struct{ RefID, Expr, LegendFormat string }
	} `json:"panels"`
	Templating struct {
		List []struct {
			Name, Type string
			Definition string
		} `json:"list"`
	} `json:"templating"`
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	b, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// The dashboard is what Grafana's JSON model asks for: panels that do not overlap on its 24
// columns, with units and queries that have names, and variables that are defined.
func TestDashboardModel(t *testing.T) {
	d := readDashboard(t)
	if d.UID == "" || d.Title == "" {
		t.Errorf("uid %q, title %q; want both", d.UID, d.Title)
	}
	if d.SchemaVersion < 36 {
		t.Errorf("schema version %d, want 36 or later: data sources are objects from there on", d.SchemaVersion)
	}
	defined := map[string]bool{"__rate_interval": true}
	for _, v := range d.Templating.List {
		defined[v.Name] = true
	}
	kinds := map[string]bool{"stat": true, "timeseries": true}
	ids, taken := map[int]bool{}, map[[2]int]string{}
	for _, p := range d.Panels {
		if ids[p.ID] || p.ID == 0 {
			t.Errorf("%s: ID %d is not its own", p.Title, p.ID)
		}
		ids[p.ID] = true
		if !kinds[p.Type] {
			t.Errorf("%s: kind %q", p.Title, p.Type)
		}
		expect.Equal(t, p.Datasource.Type, "prometheus", "%s: type of the data source", p.Title)
		expect.Equal(t, p.Datasource.UID, "${datasource}", "%s: UID of the data source", p.Title)
		for what, text := range map[string]string{"unit": p.FieldConfig.Defaults.Unit, "description": p.Description} {
			if text == "" {
				t.Errorf("%s: no %s", p.Title, what)
			}
		}
		g := p.GridPos
		switch {
		case g.W < 1:
			t.Errorf("%s: W is %v, want at least 1", p.Title, g.W)
		case g.H < 1:
			t.Errorf("%s: H is %v, want at least 1", p.Title, g.H)
		case g.X < 0:
			t.Errorf("%s: X is %v, want at least 0", p.Title, g.X)
		case g.X+g.W > 24:
			t.Errorf("%s: place %+v", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" {
					t.Fatalf("%s lies on %s", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		refs := map[string]bool{}
		for _, q := range p.Targets {
			if refs[q.RefID] {
				t.Errorf("%s: two queries are %q", p.Title, q.RefID)
			}
			for what, text := range map[string]string{"ID": q.RefID, "expression": q.Expr, "legend": q.LegendFormat} {
				if text == "" {
					t.Errorf("%s: query %q has no %s", p.Title, q.RefID, what)
				}
			}
			refs[q.RefID] = true
			for _, m := range regexp.MustCompile(`\$\{?(\w+)`).FindAllStringSubmatch(q.Expr, -1) {
				if !defined[m[1]] {
					t.Errorf("%s: variable %s is not defined", p.Title, m[1])
				}
			}
		}
		if len(p.Targets) == 0 {
			t.Errorf("%s has no query", p.Title)
		}
	}
}

// Every query of the dashboard, asked of a Prometheus that reads a daemon, has an answer.
func TestDashboardQueries(t *testing.T) {
	prometheus, err := exec.LookPath("prometheus")
	if err != nil {
		t.Skip("prometheus is not installed: the queries of the dashboard are not run")
	}
	parallel(t)
	d := readDashboard(t)
	s, a, b := newPair(t)
	a.run(a.config("metrics: \":9755\"\nmetric_peers: 5\n")...)
	b.run()
	a.connect(b, "RC")
	config := filepath.Join(s.dir, "prometheus.yml")
	s.must(os.WriteFile(config,
		[]byte(
			"global: {scrape_interval: 1s}\nscrape_configs:\n  - job_name: ipoibcm\n    static_configs: [{targets: "+
				"['127.0.0.1:9755']}]\n"), 0o600))
	log, err := os.Create(filepath.Join(s.dir, "prometheus.log"))
	s.must(err)
	cmd := exec.Command(prometheus, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(s.dir, "tsdb"),
		"--web.listen-address=127.0.0.1:9090")
	cmd.Stdout, cmd.Stderr = log, log
	s.must(a.Start(cmd))
	s.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
	})
	stop := transfer(a, b)
	defer stop()
	_, dropped := a.flow(b, nextTo(b.v4), 100) // nobody has that address
	defer dropped()
	ask := promClient(a)
	for _, p := range d.Panels {
		for _, q := range p.Targets {
			expr := concrete(q.Expr, "30s")
			var got []promSeries
			s.eventually(patience, p.Title+" "+q.RefID, func() (err error) {
				got, err = ask(s.ctx, "query", url.Values{"query": {expr}})
				return err
			})
			for _, series := range got {
				if p.Title == dropsPanel && series.Value[1] == "0" {
					t.Errorf("%s: %v is 0, want those alone that count", p.Title, series.Metric)
				}
			}
		}
	}
	for _, v := range d.Templating.List {
		m := regexp.MustCompile(`^label_values\((\w+).*, (\w+)\)$`).FindStringSubmatch(v.Definition)
		if v.Type != "query" {
			continue
		}
		if m == nil {
			t.Errorf("variable %s: %q is not understood", v.Name, v.Definition)
			continue
		}
		s.eventually(patience, "variable "+v.Name, func() error {
			_, err := ask(s.ctx, "query", url.Values{"query": {"count by (" + m[2] + ") (" + m[1] + ")"}})
			return err
		})
	}
	if *dashboardTo != "" {
		stop()
		dropped()
		paint(t, d, a, b, ask)
	}
}

// nextTo returns another address of the network that a is in.
func nextTo(a netip.Addr) netip.Addr {
	b := a.As4()
	b[3] ^= 0x80
	return netip.AddrFrom4(b)
}

// concrete is a query with the variables of the dashboard filled in.
func concrete(expr, interval string) string {
	return strings.NewReplacer("$__rate_interval", interval, "$instance", ".*", "$interface", ".*").Replace(expr)
}

// A promSeries is one series of an answer: of query the last value, of query_range all.
type promSeries struct {
	Metric map[string]string
	Value  [2]any
	Values [][2]any
}

// A promAsk asks a Prometheus by a path of its API.
type promAsk func(ctx context.Context, what string, ask url.Values) ([]promSeries, error)

// promClient returns what asks the Prometheus of a host, and reports an error where
// the answer is empty or none.
func promClient(h *host) promAsk {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
			err = h.Do(func() error {
				conn, err = net.DialTimeout(network, addr, time.Second)
				return err
			})
			return conn, err
		}}}
	return func(ctx context.Context, what string, ask url.Values) ([]promSeries, error) {
		r, err := http.NewRequestWithContext(ctx, "GET", "http://127.0.0.1:9090/api/v1/"+what+"?"+ask.Encode(), nil)
		if err != nil {
			return nil, err
		}
		resp, err := c.Do(r)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		if err != nil {
			return nil, err
		}
		var got struct {
			Status, Error string
			Data          struct{ Result []promSeries }
		}
		if err := json.Unmarshal(b, &got); err != nil {
			return nil, fmt.Errorf("%w: %s", err, b)
		}
		if got.Status != "success" || len(got.Data.Result) == 0 {
			return nil, fmt.Errorf("%s: %s %s, %d series", ask.Get("query"), got.Status, got.Error, len(got.Data.Result))
		}
		return got.Data.Result, nil
	}
}
