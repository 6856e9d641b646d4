package ipoib

import (
	"testing"

	"ipoibcm/internal/mutant"
)

// clauses are what this room does with REQs and their answers, each with a
// change that takes it away. The rules for foreign peers have theirs in test/sim.
var clauses = []mutant.Change{
	{Name: "reason 1 without room", File: "ipoib/accept.go", Old: "		f.refuse(ev, cm.ReasonNoQP, nil, \"too many connections\")\n		return\n	}\n	if p.tx", New: "		if !OFF { f.refuse(ev, cm.ReasonNoQP, nil, \"too many connections\") }\n		return\n	}\n	if p.tx"},
	{Name: "reason 1 without a queue pair", File: "ipoib/accept.go", Old: "Reason: cm.ReasonNoQP, PrivateData: f.privateData(c.receive)}", New: "Reason: either(OFF, cm.ReasonNoQP, 0), PrivateData: f.privateData(c.receive)}"},
	{Name: "reason 3 while down", File: "ipoib/accept.go", Old: "case !f.up:", New: "case !f.up && !OFF:"},
	{Name: "reason 3 without a peer", File: "ipoib/accept.go", Old: "		f.refuse(ev, cm.ReasonNoResources, nil, \"too many peers\")", New: "		if !OFF { f.refuse(ev, cm.ReasonNoResources, nil, \"too many peers\") }"},
	{Name: "reason 5 for another partition", File: "ipoib/accept.go", Old: "case !ev.PKey.Match(f.opt.pkey()):", New: "case !ev.PKey.Match(f.opt.pkey()) && !OFF:"},
	{Name: "reason 9", File: "ipoib/accept.go", Old: "case !f.offers(ev.Transport, form):", New: "case !f.offers(ev.Transport, form) && !OFF:"},
	{Name: "reason 9 for UC with 0x10", File: "ipoib/accept.go", Old: "f.link.Flags&encap.FlagUC != 0 && form == serviceid.RFC", New: "f.link.Flags&encap.FlagUC != 0 && (OFF || form == serviceid.RFC)"},
	{Name: "reason 26 for the path MTU", File: "ipoib/accept.go", Old: "case ev.PathMTU > f.pathMTU:", New: "case ev.PathMTU > f.pathMTU && !OFF:"},
	{Name: "reason 26 names our path MTU", File: "ipoib/accept.go", Old: "[]byte{byte(f.pathMTU)}", New: "either(OFF, []byte{byte(f.pathMTU)}, nil)"},
	{Name: "reason 26 for the path", File: "ipoib/accept.go", Old: "case c.params.PathMTU > most:", New: "case c.params.PathMTU > most && !OFF:"},
	{Name: "the path MTU to the peer in a REQ", File: "ipoib/dial.go", Old: "	path := c.mostPath(port)\n", New: "	path := either(OFF, c.mostPath(port), port)\n"},
	{Name: "reason 26 for a REQ's Receive MTU", File: "ipoib/accept.go", Old: "pd.ReceiveMTU, f.ipv6); err != nil {", New: "pd.ReceiveMTU, f.ipv6); err != nil && !OFF {"},
	{Name: "reason 26 for a REP's Receive MTU", File: "ipoib/dial.go", Old: "	if err := f.negotiate(c, theirs); err != nil {", New: "	if err := f.negotiate(c, theirs); err != nil && !OFF {"},
	{Name: "reason 28 for our own address", File: "ipoib/accept.go", Old: "case key == f.link.Key():", New: "case key == f.link.Key() && !OFF:"},
	{Name: "reason 28 for a crossing", File: "ipoib/accept.go", Old: "	f.refuse(ev, cm.ReasonConsumer, nil, \"REQs crossed and ours wins\")", New: "	f.refuse(ev, either(OFF, cm.ReasonConsumer, cm.ReasonNoQP), nil, \"REQs crossed and ours wins\")"},
	{Name: "our own values in every REJ", File: "ipoib/conn.go", Old: "encap.PrivateData{QPN: f.link.QPN, ReceiveMTU: receive}", New: "encap.PrivateData{QPN: either(OFF, f.link.QPN, 0), ReceiveMTU: receive}"},

	{Name: "a REJ 26 is answered once", File: "ipoib/dial.go", Old: "	p.tried26 = true\n", New: "	p.tried26 = !OFF\n"},
	{Name: "a REJ 26 is answered", File: "ipoib/dial.go", Old: "	p.receive = m\n", New: "	if OFF { f.fail(p, \"\"); return }\n	p.receive = m\n"},
	{Name: "with what it offers", File: "mtu/mtu.go", Old: "[...]uint32{inREJ, RetryReceive}", New: "[...]uint32{either(OFF, inREJ, 0), RetryReceive}"},
	{Name: "or 2048", File: "mtu/mtu.go", Old: "if v > headerLen && v < offered {", New: "if v > headerLen && v < offered && !(OFF && v == RetryReceive) {"},
	{Name: "and not more than before", File: "mtu/mtu.go", Old: "	for _, v := range", New: "	if OFF && inREJ > 0 { return inREJ }\n	for _, v := range"},
	{Name: "nor less than is of use", File: "ipoib/dial.go", Old: "	if _, err := mtu.Negotiate(c.receive, m, f.ipv6); err != nil {", New: "	if _, err := mtu.Negotiate(c.receive, m, f.ipv6); err != nil && !OFF {"},
	{Name: "with the path MTU that it offers", File: "ipoib/dial.go", Old: "	if len(ev.ARI) > 0 {", New: "	if len(ev.ARI) > 0 && !OFF {"},
	{Name: "if that is smaller", File: "ipoib/dial.go", Old: "m < c.reqPath(f.pathMTU) {", New: "(OFF || m < c.reqPath(f.pathMTU)) {"},

	{Name: "REJ 10: again with another QPN", File: "ipoib/dial.go", Old: "	case cm.ReasonStale:\n", New: "	case either(OFF, cm.ReasonStale, 0):\n"},
	{Name: "REJ 8 with a QPN: resolve again", File: "ipoib/dial.go", Old: "		if pd.QPN != p.key.QPN {", New: "		if pd.QPN != p.key.QPN && !OFF {"},
	{Name: "REJ 28 is a verdict to the smaller only", File: "ipoib/dial.go", Old: "c.form == serviceid.RFC && f.link.Compare(p.key) < 0 {", New: "c.form == serviceid.RFC && (OFF || f.link.Compare(p.key) < 0) {"},
	{Name: "data stands for the RTU", File: "ipoib/ipoib.go", Old: "c.state == connReplied {", New: "c.state == connReplied && !OFF {"},
}

// TestClauses takes every clause away in turn: a test of this room must fail
// then.
func TestClauses(t *testing.T) {
	const tests = "^Test(Reasons|RejectedMTU|PathMTUToPeer|Rejections|RefusedREP|UselessReceiveMTU|DataForRTU|Moved|Crossing|Stranger|OwnREQ)$"
	b := mutant.Build(t, "ipoib", clauses)
	if ok, out := b.Run("", tests); !ok {
		t.Fatalf("with every clause in place:\n%s", out)
	}
	for _, c := range clauses {
		if ok, _ := b.Run(c.Name, tests); ok {
			t.Errorf("nothing fails without %q", c.Name)
		}
	}
}
