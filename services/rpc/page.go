package rpc

import (
	"encoding/base64"
	"strconv"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Page sizes of every List.
const (
	defaultPage = 200
	largestPage = 1000
)

// pageSize checks a page size. KindInvalid.
func pageSize(n int32) (int, error) {
	switch {
	case n == 0:
		return defaultPage, nil
	case n < 0 || n > largestPage:
		return 0, fleet.Errorf(fleet.KindInvalid, "page_size %d: use 1 to %d, or 0 for %d", n, largestPage, defaultPage)
	}
	return int(n), nil
}

// slicePage cuts one page out of a list that is read whole because it is small (hosts, pools, devices, images).
func slicePage[T any](all []T, size int32, token string) (page []T, next string, err error) {
	limit, err := pageSize(size)
	if err != nil {
		return nil, "", err
	}
	from := 0
	if token != "" {
		raw, err := base64.RawURLEncoding.DecodeString(token)
		if err == nil {
			from, err = strconv.Atoi(string(raw))
		}
		if err != nil || from < 0 {
			return nil, "", fleet.Errorf(fleet.KindInvalid, "page_token %q did not come from this List", token)
		}
	}
	from = min(from, len(all))
	to := min(from+limit, len(all))
	if to < len(all) {
		next = base64.RawURLEncoding.EncodeToString([]byte(strconv.Itoa(to)))
	}
	return all[from:to], next, nil
}
