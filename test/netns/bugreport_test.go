package netns

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// A report of a busy host has what its daemon says, without identifiers of connections.
func TestBugreport(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	a.runFile("qkey: 0x0b1b\n")
	b.run("--mode", "rc")
	a.connect(b, "RC")
	conn := a.conns(b)[0]
	file := a.path(".tar.gz")
	out, errs, code := a.output("bugreport", "--control", a.path(".sock"), "--config", a.path(".yaml"), file)
	if code != 0 || strings.TrimSpace(out) != file {
		t.Fatalf("exit status %d, printed %q\n%s", code, out, errs)
	}
	all, err := exec.Command("tar", "xzOf", file).Output()
	s.must(err)
	text := string(all)
	for _, secret := range []string{conn.LocalCommID, conn.RemoteCommID, conn.LocalQPN, conn.RemoteQPN} {
		if strings.Contains(text, secret) {
			t.Errorf("the report has %s, which protects a connection", secret)
		}
	}
	for _, want := range []string{`"local_comm_id": "redacted"`, "qkey: left out", "connection up", b.v4.String(),
		"/proc/sys/net/ipv4/conf/" + ifName, "doctor.json "} {
		if !strings.Contains(text, want) {
			t.Errorf("the report does not have %q", want)
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^(\S+\.json) +missing.*$`).FindAllString(text, -1) {
		t.Error(m)
	}
}
