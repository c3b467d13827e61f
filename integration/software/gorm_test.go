package software

import (
	"errors"
	"testing"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgadvlock/pgadvlock"
)

type product struct {
	gorm.Model
	Code  string `gorm:"unique"`
	Price uint
	Tags  []tag
}

type tag struct {
	ID        uint
	ProductID uint
	Name      string
}

func openGORM(t *testing.T, dsn string, prepare bool) *gorm.DB {
	t.Helper()
	db, err := gorm.Open(postgres.New(postgres.Config{DriverName: "pgadvlock", DSN: dsn}),
		&gorm.Config{TranslateError: true, PrepareStmt: prepare, Logger: logger.Discard})
	must(t, err)
	t.Cleanup(func() {
		pool, err := db.DB()
		must(t, err)
		pool.Close()
	})
	return db
}

func TestGORM(t *testing.T) {
	everywhere(t, func(t *testing.T, p place) {
		db := openGORM(t, p.dsn, false)
		useGORM(t, p, db)
		var got bool
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return db.Exec("SELECT pg_advisory_lock(?)", 42).Error })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return db.Raw("SELECT pg_try_advisory_lock(?)", 42).Scan(&got).Error })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return db.Raw("SELECT pg_advisory_unlock(42)").Row().Scan(&got) })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error {
			_, err := db.WithContext(t.Context()).Raw("SELECT pg_try_advisory_lock(42)").Rows()
			return err
		})
		pool, err := db.DB()
		must(t, err)
		leak(t, p, pool)
	})
}

// With PrepareStmt, GORM prepares on the pool, which is not judged: whether the
// statement runs in a transaction is known only later. What leaks is released.
func TestGORMPreparing(t *testing.T) {
	everywhere(t, func(t *testing.T, p place) {
		db := openGORM(t, p.dsn, true)
		useGORM(t, p, db)
		must(t, db.Exec("SELECT pg_advisory_lock(?)", 42).Error)
		p.nothingHeld(t)
		reported(t, pgadvlock.RuleLeakedSessionLock, "gorm_test.go")
	})
}

func useGORM(t *testing.T, p place, db *gorm.DB) {
	t.Helper()
	must(t, db.AutoMigrate(&product{}, &tag{}))
	must(t, db.AutoMigrate(&product{}, &tag{})) // again, over what is there
	must(t, db.Create(&product{Code: "D42", Price: 100, Tags: []tag{{Name: "a"}, {Name: "b"}}}).Error)
	var found product
	must(t, db.Preload("Tags").First(&found, "code = ?", "D42").Error)
	must(t, db.Model(&found).Updates(product{Price: 200}).Error)
	must(t, db.First(&found, found.ID).Error)
	if found.Price != 200 || len(found.Tags) != 2 {
		t.Errorf("%+v", found)
	}
	if err := db.Create(&product{Code: "D42"}).Error; !errors.Is(err, gorm.ErrDuplicatedKey) {
		t.Errorf("the server's error is not recognised: %v", err)
	}
	if err := db.First(&product{}, "code = ?", "none").Error; !errors.Is(err, gorm.ErrRecordNotFound) {
		t.Error(err)
	}
	must(t, db.Transaction(func(tx *gorm.DB) error {
		if err := tx.Exec("SELECT pg_advisory_xact_lock(?)", 42).Error; err != nil {
			return err
		}
		if !p.see.Held(42) {
			t.Error("not held in the transaction")
		}
		err := tx.Transaction(func(tx *gorm.DB) error { // a savepoint
			must(t, tx.Exec("SELECT pg_advisory_xact_lock(?)", 43).Error)
			return errors.New("back to it")
		})
		if err == nil || p.see.Held(43) {
			t.Error(err)
		}
		return tx.Delete(&found).Error
	}))
	// A connection of its own.
	must(t, db.Connection(func(tx *gorm.DB) error {
		var got bool
		must(t, tx.Raw("SELECT pg_try_advisory_lock(?)", 42).Scan(&got).Error)
		if !got || !p.see.Held(42) {
			t.Error("not held on the connection")
		}
		return tx.Exec("SELECT pg_advisory_unlock(?)", 42).Error
	}))
	p.nothingHeld(t)
	silent(t)
}
