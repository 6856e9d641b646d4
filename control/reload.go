package control

// PathReload has the agent read its configuration file again: POST, from root or the
// agent's own user. With ?check=1 nothing is changed.
const PathReload = "/v1/reload"

// When a changed setting takes effect.
const (
	EffectNow            = "now"
	EffectNewConnections = "new connections" // connections that are up stay as they are
	EffectRestart        = "restart"         // only after a restart
)

// A Change is one setting in which the file differs from the running agent.
type Change struct {
	Key    string `json:"key"`
	From   string `json:"from"`
	To     string `json:"to"`
	Effect string `json:"effect"`
	Why    string `json:"why,omitempty"` // why it takes a restart
}

// A Reload answers PathReload. Either all changes are applied or none.
type Reload struct {
	Version int      `json:"version"`
	File    string   `json:"file"`
	Changes []Change `json:"changes"`
	Refused bool     `json:"refused"` // a change takes a restart, so nothing was touched
	Applied bool     `json:"applied"` // false also where nothing was to do, or with check
}
