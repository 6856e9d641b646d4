package long

import "testing"

func TestForm(t *testing.T) {
	for _, tt := range []struct {
		value string
		want  bool
	}{{"", false}, {"0", false}, {"1", true}} {
		t.Setenv(Variable, tt.value)
		if got := Form(); got != tt.want {
			t.Errorf("%s=%q: long form %v, want %v", Variable, tt.value, got, tt.want)
		}
		want := "few"
		if tt.want {
			want = "many"
		}
		if got := Of("few", "many"); got != want {
			t.Errorf("%s=%q: %s, want %s", Variable, tt.value, got, want)
		}
		ran := false
		t.Run("only", func(t *testing.T) {
			Only(t)
			ran = true
		})
		if ran != tt.want {
			t.Errorf("%s=%q: a test without a short form ran: %v, want %v", Variable, tt.value, ran, tt.want)
		}
		ran = false
		t.Run("one goroutine", func(t *testing.T) {
			OneGoroutine(t)
			ran = true
		})
		if want := !Race; ran != want {
			t.Errorf("%s=%q, race detector %v: a test on one goroutine ran: %v, want %v", Variable, tt.value, Race, ran, want)
		}
	}
}
