package gateway

import (
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"connectrpc.com/connect"

	"github.com/carrel-dev/carrel/services/fleet"
)

// ownHosts lets in only requests that name this gateway, before any route is looked up. A browser sends the name of the page that it shows,
// so that a page of another name that was made to lead here (DNS rebinding, threat T-5) reaches nothing. Ports do not count: a tunnel may
// have another, and no page can choose its name by a port.
type ownHosts struct {
	names map[string]bool
	next  http.Handler
	log   *slog.Logger
}

// ownHosts wraps the routes of the public port.
func (g *Gateway) ownHosts(next http.Handler) http.Handler {
	o := &ownHosts{names: map[string]bool{}, next: next, log: g.log}
	names := append(serverNames(&g.cfg), g.cfg.Hosts...)
	for _, name := range append(names, hostOf(g.BaseURL())) {
		o.names[plainHost(name)] = true
	}
	return o
}

// ServeHTTP implements http.Handler. The name is that of the Host header, or of `:authority` with HTTP/2.
func (o *ownHosts) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if name := plainHost(r.Host); o.names[name] || ownAddress(name) {
		o.next.ServeHTTP(w, r)
		return
	}
	o.log.Debug("request for another host refused", "host", r.Host, "from", r.RemoteAddr)
	err := fleet.Errorf(fleet.KindConflict, "this gateway is not known as %q; use the address of your sign-in link, or ask an admin to add the name to the setting hosts", clip(r.Host))
	refuseHost(w, r, err)
}

// refuseHost answers 421. Calls of clients get Connect's form of an error, since they show its message.
func refuseHost(w http.ResponseWriter, r *http.Request, err error) {
	if r.Method != http.MethodPost {
		http.Error(w, fleet.UserMessage(err), http.StatusMisdirectedRequest)
		return
	}
	body, marshalErr := json.Marshal(map[string]string{"code": connect.CodeFailedPrecondition.String(), "message": fleet.UserMessage(err)})
	if marshalErr != nil {
		http.Error(w, http.StatusText(http.StatusMisdirectedRequest), http.StatusMisdirectedRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusMisdirectedRequest)
	_, _ = w.Write(body) // the client is gone
}

// plainHost is a host without port, brackets, final dot and capitals.
func plainHost(text string) string {
	host, _, err := net.SplitHostPort(text)
	if err != nil {
		host = text
	}
	if inner, ok := strings.CutPrefix(host, "["); ok && strings.HasSuffix(inner, "]") {
		host = strings.TrimSuffix(inner, "]")
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// ownAddress reports whether a host is a literal address of loopback or of one of this machine's interfaces as they are now.
func ownAddress(host string) bool {
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	addr = addr.Unmap().WithZone("")
	if addr.IsLoopback() {
		return true
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, a := range own {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil && prefix.Addr().Unmap() == addr {
			return true
		}
	}
	return false
}

// clip keeps an echoed input short.
func clip(text string) string {
	if len(text) > 60 {
		return text[:60] + "…"
	}
	return text
}
