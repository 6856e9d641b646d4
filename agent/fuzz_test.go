package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"ipoibcm/control"
)

// FuzzRequest gives the control socket any request. The answer is a document, or
// an error in words.
func FuzzRequest(f *testing.F) {
	for _, path := range []string{
		control.PathStatus, control.PathConns, control.PathNeigh, control.PathRoutes, control.PathGroups, control.PathStats,
		control.PathRuntime,
		control.PathExplain + "?ip=10.0.0.2", control.PathExplain + "?ip=fe80::1%25eth0", control.PathExplain + "?ip=x;",
		control.PathEvents,
		control.PathCapture + "?snap=-1", control.PathCapture + "?snap=99999999999999999999", control.PathMetrics,
		"/", "/v2/status",
	} {
		f.Add([]byte("GET " + path + " HTTP/1.1\r\nHost: agent\r\n\r\n"))
	}
	f.Add([]byte("POST /v1/status HTTP/1.1\r\nHost: agent\r\nContent-Length: 4\r\n\r\nabcd"))
	a, p := newAgent(f)
	go func() {
		for range p.tap {
		}
	}()
	go func() { // the driver
		for q := range a.queries {
			q()
		}
	}()
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	h := a.handler()
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(b)))
		if err != nil {
			return
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r.WithContext(ended))
		if w.Code >= 400 && w.Header().Get("Content-Type") == "application/json" {
			var e control.Error
			switch err := json.Unmarshal(w.Body.Bytes(), &e); {
			case err != nil:
				t.Errorf("%d %q: %v", w.Code, w.Body, err)
			case e.Version != control.Version:
				t.Errorf("%d %q: Version is %v, want %v", w.Code, w.Body, e.Version, control.Version)
			case e.Error == "":
				t.Errorf("%d %q: Error is empty", w.Code, w.Body)
			}
		}
	})
}
