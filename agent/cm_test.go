package agent

import (
	"fmt"
	"strings"
	"testing"

	"ipoibcm/internal/expect"
	"ipoibcm/ipoib"
	"ipoibcm/verbs"
)

// A madless provider has QP 1 or has not, and nothing else.
type madless struct {
	verbs.Provider
	port verbs.MADPort
}

func (m madless) MADPort() verbs.MADPort { return m.port }

type madPort struct{ verbs.MADPort }

// What a provider without QP 1 means for each policy: gsi refuses to start, auto
// says that messages travel in-band, inband does not care.
func TestProviderWithoutQP1(t *testing.T) {
	for _, tt := range []struct {
		port verbs.MADPort
		cm   ipoib.CMTransport
		err  string
		note string
	}{
		{nil, ipoib.CMGSI, "cm_transport auto", ""},
		{nil, ipoib.CMAuto, "", "in-band"},
		{nil, ipoib.CMInband, "", ""},
		{madPort{}, ipoib.CMGSI, "", ""},
		{madPort{}, ipoib.CMAuto, "", ""},
	} {
		a := &Agent{opt: Options{Provider: madless{port: tt.port}, CM: tt.cm}}
		refusal := ""
		if err := a.checkCM(); err != nil {
			refusal = "error: " + err.Error()
		}
		what := fmt.Sprintf("%v, QP 1 %v", tt.cm, tt.port != nil)
		checkText(t, what+": refusal", refusal, tt.err)
		checkText(t, what+": notes", strings.Join(a.opt.Notes, ""), tt.note)
	}
}

// checkText checks that got contains want, or is empty if want is.
func checkText(t *testing.T, what, got, want string) {
	t.Helper()
	if want == "" {
		expect.Equal(t, got, "", "%s", what)
	}
	if !strings.Contains(got, want) {
		t.Errorf("%s: %q, want %q in it", what, got, want)
	}
}
