package doctor

import (
	"fmt"
	"strings"
	"testing"
)

// Parts of rules as nft prints them.
const (
	policyDrop = "drop"
	saddr      = `{"match": {"op": "==", "left": {"payload": {"protocol": "ip6", "field": "saddr"}}, "right": "fe80::1"}}`
	dport      = `{"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}}, "right": 4791}}`
	tcpPort    = `{"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 22}}`
	ports      = `{"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}}, "right": {"set": [53, {"range": [4000, 5000]}]}}}`
	otherPorts = `{"match": {"op": "!=", "left": {"payload": {"protocol": "th", "field": "dport"}}, "right": {"set": [53, 67]}}}`
	onLoopback = `{"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "lo"}}`
	onUnderlay = `{"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "eth*"}}`
	known      = `{"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established", "related"]}}`
	states     = `{"vmap": {"key": {"ct": {"key": "state"}}, "data": {"set": [["invalid", {"drop": null}], ["established", {"accept": null}]]}}}`
	newState   = `{"vmap": {"key": {"ct": {"key": "state"}}, "data": {"set": [["new", {"jump": {"target": "own"}}]]}}}`
	jump       = `{"jump": {"target": "own"}}`
	accept     = `{"accept": null}`
	drop       = `{"drop": null}`
	counted    = `{"counter": {"packets": 0, "bytes": 0}}`
	limited    = `{"limit": {"rate": 5, "burst": 5, "per": "second"}}`
	notRoot    = `{"match": {"op": "!=", "left": {"meta": {"key": "skuid"}}, "right": {"set": ["root", 999]}}}`
	notOthers  = `{"match": {"op": "!=", "left": {"meta": {"key": "skuid"}}, "right": 999}}`
	xtReject   = `{"xt": {"type": "target", "name": "REJECT"}}`
	xtMark     = `{"xt": {"type": "target", "name": "MARK"}}`
	byAddress  = `{"vmap": {"key": {"payload": {"protocol": "ip6", "field": "saddr"}}, "data": {"set": [["fe80::1", {"accept": null}], ["fe80::2", {"drop": null}]]}}}`
	byPort     = `{"vmap": {"key": {"payload": {"protocol": "udp", "field": "dport"}}, "data": {"set": [[53, {"accept": null}], ["*", {"drop": null}]]}}}`
	inSet      = `{"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}}, "right": "@ports"}}`
)

// ruleset is one chain of input whose policy is to accept, with one rule.
func ruleset(expr ...string) *Ruleset { return rulesOf("input", "accept", "", [][]string{expr}, nil) }

func rulesOf(hook, policy, device string, rules, own [][]string) *Ruleset {
	objects := []string{`{"metainfo": {"json_schema_version": 1}}`,
		fmt.Sprintf(`{"chain": {"family": "inet", "table": "t", "name": "base", "hook": %q, "prio": 0, "policy": %q}}`,
			hook, policy),
		`{"chain": {"family": "inet", "table": "t", "name": "own"}}`}
	for i, chain := range [][][]string{rules, own} {
		for j, r := range chain {
			objects = append(objects,
				fmt.Sprintf(`{"rule": {"family": "inet", "table": "t", "chain": %q, "handle": %d, "expr": [%s]}}`,
					[]string{"base", "own"}[i], 10*i+j, strings.Join(r, ", ")))
		}
	}
	s, err := ParseRuleset([]byte(`{"nftables": [` + strings.Join(objects, ", ") + `]}`))
	if err != nil {
		panic(err)
	}
	return s
}

func TestFirewall(t *testing.T) {
	type rules [][]string
	for _, tt := range []struct {
		name       string
		policy     string
		rules, own rules
		want       Verdict
		why        string
	}{
		{"nothing", "accept", nil, nil, VerdictAccept, ""},
		{"policy", "drop", nil, nil, VerdictDrop, "policy of chain inet t base"},
		{"another port", "accept", rules{{tcpPort, drop}}, nil, VerdictAccept, ""},
		{"our port is open", "drop", rules{{dport, counted, accept}}, nil, VerdictAccept, ""},
		{"a range with our port", "drop", rules{{ports, accept}}, nil, VerdictAccept, ""},
		{"but some ports", "accept", rules{{otherPorts, drop}}, nil, VerdictDrop, "rule 0"},
		{"our port, with a limit", "drop", rules{{dport, limited, accept}}, nil, VerdictMaybe, "policy"},
		{"from somebody", "accept", rules{{saddr, drop}}, nil, VerdictMaybe, "rule 0"},
		{"to somebody, and all others not", "drop", rules{{saddr, accept}}, nil, VerdictMaybe, "policy"},
		{"known connections", "drop", rules{{known, accept}}, nil, VerdictDrop, "policy"},
		{"states", "drop", rules{{states}, {onLoopback, accept}}, nil, VerdictDrop, "policy"},
		{"on the underlay", "drop", rules{{onUnderlay, accept}}, nil, VerdictAccept, ""},
		{"a chain that drops", "accept", rules{{jump}}, rules{{dport, drop}}, VerdictDrop, "rule 10 of chain inet t own"},
		{"a chain that returns", "accept", rules{{jump}}, rules{{`{"return": null}`}, {drop}}, VerdictAccept, ""},
		{"goto, and nothing there", "accept", rules{{`{"goto": {"target": "own"}}`}, {drop}}, nil, VerdictAccept, ""},
		{"a chain by state", "drop", rules{{newState}}, rules{{dport, accept}}, VerdictAccept, ""},
		{"a chain that leads to itself", "accept", rules{{jump}}, rules{{jump}}, VerdictAccept, ""},
		{"a set by name", "accept", rules{{inSet, drop}}, nil, VerdictMaybe, "rule 0"},
		{"iptables refuses what no rule before it took", "accept", rules{{counted, xtReject}}, nil, VerdictMaybe, "rule 0"},
		{"iptables accepts, and refuses the rest", "accept", rules{{dport, accept}, {counted, xtReject}}, nil, VerdictAccept, ""},
		{"iptables marks", "accept", rules{{xtMark}}, nil, VerdictAccept, ""},
		{"by address", "accept", rules{{byAddress}}, nil, VerdictMaybe, "rule 0"},
		{"by port, and all others", "accept", rules{{byPort}}, nil, VerdictDrop, "rule 0"},
		{"the first rule counts", "accept", rules{{dport, accept}, {drop}}, nil, VerdictAccept, ""},
		{"a statement of tomorrow", "accept", rules{{`{"teleport": {"to": 1}}`}, {dport, drop}}, nil, VerdictDrop, "rule 1"},
	} {
		s := rulesOf("input", tt.policy, "eth0", tt.rules, tt.own)
		v, why := s.Verdict(RoCEPacket{Hook: "input", Device: "eth0", IPv6: true})
		if v != tt.want {
			t.Errorf("%s: verdict %d, want %d", tt.name, v, tt.want)
		}
		if !strings.Contains(why, tt.why) || (tt.why == "") != (why == "") {
			t.Errorf("%s: by %q, want %q", tt.name, why, tt.why)
		}
		if v, _ := s.Verdict(RoCEPacket{Hook: "output", Device: "eth0", IPv6: true}); v != VerdictAccept {
			t.Errorf("%s: output has verdict %d, and no rules", tt.name, v)
		}
	}
}

// The rule of docs/security.md lets the daemon send.
func TestFirewallUser(t *testing.T) {
	for _, tt := range []struct {
		rule string
		want Verdict
	}{{notRoot, VerdictAccept}, {notOthers, VerdictDrop}} {
		s := rulesOf("output", "accept", "", [][]string{{dport, tt.rule, drop}}, nil)
		if v, _ := s.Verdict(RoCEPacket{Hook: "output", Device: "eth0", User: []any{"root", 0.0}}); v != tt.want {
			t.Errorf("%s: verdict %d, want %d", tt.rule, v, tt.want)
		}
	}
}

func FuzzParseRuleset(f *testing.F) {
	f.Add([]byte(`{"nftables": [{"chain": {"family": "inet", "table": "t", "name": "base", "hook": "input", "prio": 0, "policy": "drop"}},
		{"rule": {"family": "inet", "table": "t", "chain": "base", "handle": 1, "expr": [` + ports + `, ` + accept + `]}},
		{"rule": {"family": "inet", "table": "t", "chain": "base", "handle": 2, "expr": [` + states + `]}}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseRuleset(b)
		if err != nil {
			return
		}
		for _, hook := range []string{"input", "output"} {
			v, why := s.Verdict(RoCEPacket{Hook: hook, Device: "eth0", IPv6: true, User: []any{"root", 0.0}})
			if v > VerdictDrop || (v != VerdictAccept) != (why != "") {
				t.Errorf("%s: verdict %d by %q", hook, v, why)
			}
		}
	})
}
