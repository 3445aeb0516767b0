package gateway

import "net/url"

// hostOf returns the host part of a URL; empty when there is none.
func hostOf(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return ""
	}
	return u.Hostname()
}
